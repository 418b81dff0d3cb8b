"""deploy/compose.yaml: every service that can run here runs on a separate host, and a job trains."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.domain.jobs.job import JobState
from tests.support.hosts.compose import OURS, Service, ports, read, why_not
from tests.support.hosts.containers import run
from tests.support.hosts.hosts import Lab, lab
from tests.support.hosts.jobs import host_job
from tests.support.waiting import wait_for
from train_loop.run_dir import read_lines
from trainshed import Client

pytestmark = pytest.mark.timeout(400)
WORKERS = 2


@dataclass
class Stack:
    """The running services, by the names of their hosts."""

    lab: Lab
    services: dict[str, Service]
    secrets: Path
    client: Client


@pytest.fixture(scope="module")
def stack(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    shared.chmod(0o755)
    secrets = tmp_path_factory.mktemp("secrets")
    subprocess.run(["sh", "deploy/secrets.sh", str(secrets)], check=True, capture_output=True, timeout=30)
    raw = read({"RAY_WORKER_CPUS": "3"})["services"]
    assert raw["worker"]["deploy"] == {"replicas": WORKERS}
    here = {name: one for name, one in raw.items() if one["image"].startswith(OURS) or why_not(one["image"]) is None}
    hosts = [host for name in here for host in ([f"worker{n}" for n in (1, 2)] if name == "worker" else [name])]
    with lab(hosts, shared=shared) as made:
        made_up = {name: Service(name, here[name.rstrip("12")], host, secrets) for name, host in made.hosts.items()}
        for name, service in made_up.items():
            # As in Docker's DNS, the name resolves to all replicas.
            service.host.run("sh", "-c", f"echo {made.hosts['worker1'].address} worker >> /etc/hosts")
            service.prepare()
            if name in ("head", "worker1", "worker2"):
                service.raw = {**service.raw, "command": [*service.raw["command"], "--object-store-memory=80000000"]}
        start_all(made_up, secrets)
        port = made.hosts["service"].forward(8000)
        with Client(f"http://127.0.0.1:{port}", (secrets / "admin.key").read_text().strip()) as client:
            yield Stack(made, made_up, secrets, client)


def start_all(services: dict[str, Service], secrets: Path) -> None:
    """Start services in dependency order, each once its dependencies are healthy or done."""
    started = set[str]()
    while len(started) < len(services):
        for name, service in services.items():
            awaited = service.raw.get("depends_on", {})
            if name in started or not awaited.keys() & services.keys() <= started:
                continue
            for other, condition in awaited.items():
                if condition == {"condition": "service_healthy"}:
                    wait_for(services[other].healthy, f"{other} to be healthy")
            if service.raw.get("restart") == "no":
                run_to_its_end(service)
            elif name == "postgres":
                start_postgres(service, secrets)
            else:
                service.start()
            started.add(name)


def run_to_its_end(service: Service) -> None:
    """Run a one-off service to its end."""
    run(service.host, service.container(), seconds=120)


def start_postgres(service: Service, secrets: Path) -> None:
    """Initialise Postgres from its variables, as the image's entrypoint does."""
    environment, host = service.raw["environment"], service.host
    data = "/var/lib/postgresql/data"
    password = environment["POSTGRES_PASSWORD_FILE"]
    binaries = Path(str(shutil.which("initdb"))).resolve().parent
    host.run("install", "-d", "-m", "0700", "-o", "nobody", data)
    as_user = ["setpriv", "--reuid=nobody", "--clear-groups"]
    host.run(
        *as_user,
        f"{binaries}/initdb",
        "-D",
        data,
        "-U",
        environment["POSTGRES_USER"],
        f"--pwfile={password}",
        "-A",
        "scram-sha-256",
    )
    host.run("sh", "-c", f"echo 'host all all all scram-sha-256' >> {data}/pg_hba.conf")
    options = ["-c", "listen_addresses=*", "-k", data, "-c", "fsync=off"]
    host.spawn(*as_user, f"{binaries}/postgres", "-D", data, *options, log="postgres")
    text = (secrets / "postgres.password").read_text().strip()
    create = f"{binaries}/createdb -h 127.0.0.1 -U {environment['POSTGRES_USER']} {environment['POSTGRES_DB']}"
    wait_for(
        lambda: "no" not in host.run("sh", "-c", f"PGPASSWORD={text} {create} || echo no", check=False),
        "the database",
    )


def test_every_health_check_passes(stack: Stack) -> None:
    for name, service in stack.services.items():
        if "healthcheck" in service.raw:
            wait_for(service.healthy, f"{name} to be healthy")


def test_published_ports_respond(stack: Stack) -> None:
    found = {name: list(ports(service.raw)) for name, service in stack.services.items()}
    assert {name: numbers for name, numbers in found.items() if numbers} == {"service": [8000], "head": [8265]}
    for name, numbers in found.items():
        for number in numbers:
            url = f"http://127.0.0.1:{stack.services[name].host.forward(number)}/"
            assert httpx.get(url, timeout=60).status_code < 500


@pytest.fixture(scope="module")
def job_id(stack: Stack, shared: Path) -> str:
    """Return a job with a worker of two CPUs on each host, which runs until it is cancelled."""
    scaling = {"num_workers": WORKERS, "resources_per_worker": {"CPU": 2}}
    job = host_job(shared, training={"max_steps": 100_000}, strategy={"ulysses_size": 1}, scaling=scaling)
    wait_for(lambda: sum(node.state == "alive" for node in stack.client.api.nodes().data) == WORKERS + 1, "the workers")
    return stack.client.api.submit(yaml.safe_dump(job)).id


@pytest.fixture(scope="module")
def workers(shared: Path, job_id: str) -> list[dict[str, Any]]:
    """Return the job's workers, as its start reported them."""
    events = shared / "runs" / "default" / job_id / "attempts" / "1" / "events.jsonl"

    def started() -> dict[str, Any] | None:
        return next((line for line in read_lines(events) if line["event"] == "training_started"), None)

    found: list[dict[str, Any]] = wait_for(started, "training")["workers"]
    return found


def test_job_trains_on_the_workers(stack: Stack, job_id: str, workers: list[dict[str, Any]]) -> None:
    assert {worker["host"] for worker in workers} == {"worker1", "worker2"}
    wait_for(lambda: stack.client.api.job(job_id).progress.step > 10, "step 11")
    found = stack.client.api.job(job_id)
    assert found.state is JobState.RUNNING, found.reason
    assert str(found.dashboard_url).startswith("http://localhost:8265/#/jobs/")


def test_workers_have_as_many_threads_as_cpus(stack: Stack, workers: list[dict[str, Any]]) -> None:
    """OMP_NUM_THREADS is unset here: the numbers of the service and the supervisor must not reach the workers."""
    for worker in workers:
        environment = stack.services[worker["host"]].host.run("cat", f"/proc/{worker['pid']}/environ").split("\0")
        assert [one for one in environment if one.startswith("OMP_NUM_THREADS=")] == ["OMP_NUM_THREADS=2"]


def test_service_keeps_jobs_in_postgres(stack: Stack) -> None:
    assert not list(Path(stack.lab.folder).rglob("trainshed.db"))
    listing = stack.services["service"].host.run("ls", "-A", "/home/trainshed")
    assert "trainshed.db" not in listing


def test_prometheus_scrapes_the_service_and_every_ray_node(stack: Stack, job_id: str) -> None:
    if "prometheus" not in stack.services:
        pytest.skip("needs Debian's prometheus")
    host = stack.services["prometheus"].host
    url = f"http://127.0.0.1:{host.forward(9090)}/api/v1/query"

    def value(query: str) -> dict[str, float]:
        answer = httpx.get(url, params={"query": query}, timeout=60).json()
        return {json.dumps(one["metric"]): float(one["value"][1]) for one in answer["data"]["result"]}

    assert wait_for(lambda: value('up{job="trainshed"} == 1'), "a scrape of the service")
    assert list(value("trainshed_cluster_up").values()) == [1.0]
    assert wait_for(lambda: value('up{job="ray"} == 1'), "a scrape of Ray")
    # A scrape before the start of the service has failed, and rules are evaluated only every 15 s.
    wait_for(lambda: value(f"ALERTS{{alertname={json.dumps('TrainshedDown')}}}") == {}, "the end of the alert")
    # Prometheus would rename a label `job` of Trainshed's series.
    assert wait_for(lambda: value(f'max by (job_id) (trainshed_job_step{{job_id="{job_id}"}})'), "the job")
    command = [sys.executable, "deploy/grafana/evaluate.py", url.removesuffix("/api/v1/query")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout
    assert "Ray answers: 1 series" in result.stdout


def test_stopped_head_saves_and_is_no_failure(stack: Stack, job_id: str) -> None:
    stack.services["head"].stop()
    ended = wait_for(lambda: one if (one := stack.client.api.job(job_id).attempts[0]).result else None, "the end")
    assert (ended.result, ended.reason and ended.reason.code) == ("moved", "moving")
    assert ended.reason is not None
    assert "the head of Ray ends as planned" in ended.reason.message
    newest = max(one.step for one in stack.client.api.checkpoints(job_id).data)
    assert f"the run resumes from step {newest}" in ended.reason.message
    assert stack.client.api.job(job_id).state is JobState.RECOVERING
    wait_for(lambda: not stack.services["head"].healthy(), "the end of the head")


def test_cancelled_job_has_a_checkpoint_and_each_sample_once(stack: Stack, job_id: str) -> None:
    stack.client.api.cancel(job_id)
    wait_for(lambda: stack.client.api.job(job_id).state.terminal, "the end of the job")
    assert stack.client.api.job(job_id).state is JobState.CANCELLED
    assert stack.client.api.checkpoints(job_id).data
    assert stack.client.api.audit_job(job_id).clean


def test_no_file_of_the_stack_contains_secrets(stack: Stack) -> None:
    text = Path("deploy/compose.yaml").read_text()
    for file in stack.secrets.iterdir():
        secret = file.read_text().strip().rpartition("=")[2]
        assert secret not in text
        assert file.stat().st_mode & 0o777 == 0o444
    assert stack.secrets.stat().st_mode & 0o777 == 0o700
    before = {file.name: file.read_text() for file in stack.secrets.iterdir()}
    subprocess.run(["sh", "deploy/secrets.sh", str(stack.secrets)], check=True, capture_output=True, timeout=30)
    assert before == {file.name: file.read_text() for file in stack.secrets.iterdir()}, (
        "expected one creation of secrets"
    )
