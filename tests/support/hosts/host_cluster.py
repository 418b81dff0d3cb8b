"""Trainshed on test hosts: the systemd units, a Ray cluster of several hosts, the service, and jobs on them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from s3fs import S3FileSystem

from service.api.schemas import JobOut
from service.domain.jobs.job import JobState
from tests.support.hosts.hosts import REPOSITORY, Host, HostsFile, Lab, lab
from tests.support.hosts.jobs import host_job
from tests.support.servers.s3 import s3_environment
from tests.support.servers.worker_forks import worker_forks
from tests.support.waiting import SERVICE_PAUSE, wait_for
from train_loop.run_dir import RunDir, read_lines
from trainshed import Api, Client

_BUCKET, _S3_PORT = "trainshed", 9000
_RAYS_OWN = {
    *("ray::DashboardAgent", "ray::RuntimeEnvAgent"),
    *("ray::TrainStateActor", "ray::_AutoscalingCoordinatorActor", "ray::_StatsActor"),
}
"""Processes of Ray that exist once per cluster or once per node, for all jobs."""
TOKEN = "0123456789abcdef" * 4
SETTINGS = {
    "TRAINSHED_PORT": "8000",
    "TRAINSHED_RETRY_SECONDS": "0.5",
    "TRAINSHED_RECONCILE_SECONDS": "0.2",
}


class HostCluster:
    """A head, nodes with two CPUs each, and the service on the head's host, started only by the systemd units.

    Ray's units get `ray_variables` too. Variables of units whose name begins with one of `without` are left out.
    """

    def __init__(
        self,
        made: Lab,
        *,
        settings: Mapping[str, str] | None = None,
        ray_variables: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
    ) -> None:
        self.lab = made
        self._ray_variables = ray_variables
        self._without = without
        self.objects = made.hosts.get("storage")
        """The host with the S3 server for run directories, if any."""
        self._stack = ExitStack()
        self.head = made.hosts["head"]
        self.nodes = [host for host in made.hosts.values() if host.name.startswith("node")]
        self._settings = {**SETTINGS, **(settings or {})}
        self._client: Client | None = None
        self._submitted: list[str] = []
        self._dashboard_client: httpx.Client | None = None
        self._former = set[str]()
        """Ray's ids of the nodes that hosts had before their last start."""

    def start(self) -> None:
        """Start head, nodes and service, and wait until all nodes have joined."""
        if self.objects is not None:
            self._start_objects(self.objects)
        self.start_head()
        for node in self.nodes:
            self.start_node(node)
        self.start_service()
        self.wait_for_nodes(len(self.nodes))

    def _start_objects(self, host: Host) -> None:
        """Start the S3 server, and configure this process for it."""
        folder = self.lab.folder / "s3"
        folder.mkdir()
        host.spawn(
            "python", "-m", "tests.support.servers.s3", str(folder), f"--port={_S3_PORT}", "--host=0.0.0.0", log="s3"
        )
        wait_for((folder / "port").exists, "the S3 server")
        variables = s3_environment(f"http://127.0.0.1:{host.forward(_S3_PORT)}")
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in variables.items():
            patch.setenv(name, value)
        self._stack.callback(S3FileSystem.clear_instance_cache)
        S3FileSystem.clear_instance_cache()
        S3FileSystem().mkdir(_BUCKET)

    def start_head(self) -> None:
        """Start the head's unit."""
        self._dashboard_client = None
        self._configure(self.head)
        self.head.start_unit("trainshed-head", env=self._ray_variables, without=self._without)

    def start_node(self, node: Host) -> None:
        """Start a node's unit."""
        self._former |= {one["node_id"] for one in self.listed() if one["node_ip"] == node.address}
        self._configure(node)
        node.start_unit("trainshed-node", env=self._ray_variables, without=self._without)

    def start_service(self) -> None:
        """Start the service's unit on the head's host, and connect a client to it."""
        self.head.start_unit("trainshed-service", env=self._settings)
        wait_for(lambda: self.head.read("/var/lib/trainshed/service.json"), "the service")
        self.connect((self.head.read("/var/lib/trainshed/admin.key") or "").strip())

    def connect(self, key: str) -> None:
        """Create a client for the service, through a local port."""
        # The service listens on its host's loopback.
        port = self.head.forward(8000, address="127.0.0.1")
        self._client = Client(f"http://127.0.0.1:{port}", key)

    def close(self) -> None:
        """Close the connections of the test."""
        self._stack.close()
        if self._client is not None:
            self._client.close()
        if self._dashboard_client is not None:
            self._dashboard_client.close()

    def _configure(self, host: Host) -> None:
        text = (REPOSITORY / "deploy/systemd/trainshed.env").read_text()
        text = text.replace("NODE_ADDRESS=10.0.0.11", f"NODE_ADDRESS={host.address}")
        text = text.replace("10.0.0.10", self.head.in_url)
        if self.objects is not None:
            text = text.replace("file:///srv/trainshed/", f"s3://{_BUCKET}/")
            variables = s3_environment(f"http://{self.objects.in_url}:{_S3_PORT}")
            text += "".join(f"{name}={value}\n" for name, value in variables.items())
        small = "--object-store-memory=80000000"
        host.write(
            "/etc/trainshed/trainshed.env",
            f'{text}\nRAY_HEAD_OPTIONS="--num-cpus=0 {small}"\nRAY_NODE_OPTIONS="--num-cpus=2 {small}"\n',
        )
        host.write("/etc/trainshed/ray.token", TOKEN)

    @property
    def client(self) -> Api:
        """The API of the service."""
        assert self._client is not None
        return self._client.api

    def listed(self) -> list[dict[str, Any]]:
        """Return the Ray nodes that the head lists as alive, without the head; none if it does not answer."""
        try:
            answer = self._dashboard.get("/api/v0/nodes", params={"limit": 100})
            answer.raise_for_status()
        except httpx.HTTPError:
            return []
        nodes = answer.json()["data"]["result"]["result"]
        return [node for node in nodes if node["state"] == "ALIVE" and not node["is_head_node"]]

    @property
    def _dashboard(self) -> httpx.Client:
        """Return a client for Ray's dashboard; a restarted head needs a new one."""
        if self._dashboard_client is None:
            url = f"http://127.0.0.1:{self.head.forward(8265)}"
            self._dashboard_client = httpx.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {TOKEN}"},
                timeout=10,
                # The dashboard closes idle connections, and a call on such a connection would fail.
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        return self._dashboard_client

    def ray(self, *command: str, check: bool = True) -> str:
        """Run a command on the head, with the token and the address of Ray."""
        return self.head.run(*command, env=self.ray_env, check=check)

    @property
    def ray_env(self) -> dict[str, str]:
        """Return the variables with which a process on the head connects to Ray."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": "/etc/trainshed/ray.token",
            "RAY_ADDRESS": f"{self.head.in_url}:6379",
        }

    def wait_for_nodes(self, count: int, *, seconds: float = 180) -> None:
        """Wait until this number of nodes is alive. Ray may list a node for a minute after its host was killed."""

        def there() -> bool:
            found = {node["node_id"] for node in self.listed()}
            return len(found) == count and not found & self._former

        wait_for(there, f"{count} nodes", seconds=seconds)

    def submit(self, **parts: dict[str, Any]) -> str:
        """Submit a small job of four workers on two hosts and return its id."""
        job = host_job(self.lab.shared, **parts)
        if self.objects is not None:
            here, there = self.lab.shared / "data/tokens.parquet", f"s3://{_BUCKET}/data/tokens.parquet"
            S3FileSystem().put_file(str(here), there)
            job["data"]["train"]["path"] = there
        self._submitted.append(self.client.submit(yaml.safe_dump(job)).id)
        return self._submitted[-1]

    def wait_for_state(self, job_id: str, *states: JobState, seconds: float = 120) -> JobOut:
        """Wait until the job is in one of the states. Raises AssertionError if it ends in another."""

        def reached() -> JobOut | None:
            job = self.client.job(job_id)
            assert job.state in states or not job.state.terminal, (
                f"{job.state}: {job.reason}\n{self.debug_report(job_id)}"
            )
            return job if job.state in states else None

        return wait_for(reached, f"{job_id} in {' or '.join(states)}", seconds=seconds, pause=SERVICE_PAUSE)

    def wait_for_step(self, job_id: str, step: int, *, seconds: float = 120) -> None:
        """Wait until the job has trained a step."""

        def done() -> bool:
            job = self.client.job(job_id)
            assert not job.state.terminal or job.state is JobState.SUCCEEDED, (
                f"{job.state}: {job.reason}\n{self.debug_report(job_id)}"
            )
            return any(line["step"] >= step for line in self.metrics(job_id))

        wait_for(done, f"step {step}", seconds=seconds, pause=SERVICE_PAUSE)

    def newest_step(self, job_id: str) -> int:
        """Return the highest step that the job has trained."""
        return max(int(line["step"]) for line in self.metrics(job_id))

    def epoch_of(self, job_id: str) -> int:
        """Return the epoch of the job's newest worker group."""
        return int(self.events(job_id, "group_started")[-1]["epoch"])

    def wait_for_newer_group(self, job_id: str, epoch: int) -> None:
        """Wait until a newer group than this one has trained a new step."""
        best = max(line["step"] for line in self.metrics(job_id) if line["epoch"] <= epoch)
        wait_for(
            lambda: any(line["epoch"] > epoch and line["step"] > best for line in self.metrics(job_id)),
            f"a new step of a newer group than {epoch}",
            seconds=120,
            pause=SERVICE_PAUSE,
        )

    def late_saves_of_thawed_host(self, job_id: str) -> list[str]:
        """Freeze rank 0's host until a newer group trains; return the save events of the old group after the thaw."""
        epoch, host = self.epoch_of(job_id), self.hosts_of(job_id)[0]
        host.freeze()
        try:
            self.wait_for_newer_group(job_id, epoch)
        finally:
            # The next tests need this host.
            thawed = time.time()
            host.thaw()
        # A superseded rank exits within 5 s.
        time.sleep(8)
        late = [one for one in self.events(job_id) if one["epoch"] == epoch and one["time"] > thawed + 1]
        self.wait_for_nodes(len(self.nodes))
        return [one["event"] for one in late if one["event"].startswith("checkpoint")]

    def start_long_job(self) -> str:
        """Submit a job that runs until it is cancelled, wait for its first checkpoint, and return its id."""
        job_id = self.submit(training={"max_steps": 100_000}, checkpoint={"every_steps": 10})
        self.wait_for_step(job_id, 12)
        return job_id

    def waits_for(self, job_id: str, code: str) -> str:
        """Return the message of what the job waits for if its code is this one, otherwise an empty string."""
        found = self.client.job(job_id).progress.waits_for
        return found.message if found is not None and found.code == code else ""

    def run_dir(self, job_id: str) -> RunDir:
        """Return the job's run directory, as seen from the test."""
        if self.objects is not None:
            return RunDir.at(f"s3://{_BUCKET}/runs/default/{job_id}")
        return RunDir(self.lab.shared / "runs" / "default" / job_id)

    def hosts_of(self, job_id: str) -> dict[int, Host]:
        """Return the host of each rank of the job's newest worker group."""
        newest = self.events(job_id, "group_started")[-1]["hosts"]
        return {int(rank): self.lab.hosts[name] for rank, name in newest.items()}

    def kill_rank(self, job_id: str, rank: int, signal: str = "KILL") -> None:
        """Send a signal to the process of a rank of the newest group that trains."""
        (worker,) = [one for one in self.events(job_id, "training_started")[-1]["workers"] if one["rank"] == rank]
        self.lab.hosts[worker["host"]].run("kill", f"-{signal}", str(worker["pid"]))

    def drain(self, host: Host, *, seconds: int) -> None:
        """Send Ray a notice that a host will be removed after some seconds, as a cloud does before a preemption."""
        (node,) = wait_for(
            lambda: [one for one in self.listed() if one["node_ip"] == host.address], f"the node on {host.name}"
        )
        command = ["ray", "drain-node", "--address", f"{self.head.in_url}:6379", "--node-id", node["node_id"]]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        self.ray(*command, "--deadline-remaining-seconds", str(seconds))

    def leftovers(self, job_id: str) -> list[str]:
        """Return the job's leftovers on the hosts: processes, shared memory, and uncommitted folders."""
        found = [str(path) for path in self.run_dir(job_id).root.rglob("*.tmp-*")]
        for host in (self.head, *self.nodes):
            # A test host has no init process that reaps zombies.
            processes = [one for one in host.run("ps", "-eo", "args=").splitlines() if "<defunct>" not in one]
            found += [f"{host.name}: {one}" for one in processes if "ray::" in one and one.strip() not in _RAYS_OWN]
            found += [f"{host.name}: {one}" for one in processes if job_id in one]
            found += [f"{host.name}: /dev/shm/{name}" for name in host.run("ls", "-A", "/dev/shm").split()]
        return found

    def events(self, job_id: str, *names: str) -> list[dict[str, Any]]:
        """Return the events of all attempts, or those of some kinds."""
        lines = [line for attempt in self.run_dir(job_id).attempts() for line in read_lines(attempt.events)]
        return [line for line in lines if not names or line["event"] in names]

    def newest_events(self, *, count: int) -> list[str]:
        """Return the newest events of all jobs, one short line each."""
        found = [line for job_id in self._submitted for line in self.events(job_id)]
        return [str(line)[:300] for line in sorted(found, key=lambda line: float(line["time"]))[-count:]]

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        """Return the metrics lines of all attempts."""
        return [line for attempt in self.run_dir(job_id).attempts() for line in read_lines(attempt.metrics)]

    def debug_report(self, job_id: str) -> str:
        """Return events and the ends of all logs."""
        logs = [path for attempt in self.run_dir(job_id).attempts() for path in sorted(attempt.logs.glob("*.log"))]
        return "\n".join(
            [*map(str, self.events(job_id)), *(f"--- {path}\n{path.read_text()[-3000:]}" for path in logs)]
        )


@contextmanager
def host_cluster(
    shared: Path,
    nodes: int = 2,
    *,
    hosts_files: Sequence[HostsFile] = ("real",),
    settings: Mapping[str, str] | None = None,
    s3: bool = False,
    ipv6: bool = False,
) -> Iterator[HostCluster]:
    """Run a cluster on test hosts; with `s3`, run directories and data are on the S3 server of a further host."""
    names = ["head", *(f"node{number}" for number in range(1, nodes + 1)), *(["storage"] if s3 else [])]
    with lab(names, shared=shared, hosts_files=hosts_files, ipv6=ipv6) as made:
        # Jobs run through many faults: their tests mostly wait.
        forks = worker_forks(link=made.folder / "forks", step_seconds=0.05)
        cluster = HostCluster(made, settings=settings, ray_variables=forks)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
