"""Seconds from the loss of a host to the first new step on three hosts: Trainshed against a plain Ray TorchTrainer.

`python -m benchmarks.faults.hosts [--rounds N] [--quick]`. It needs root and iproute2. Hosts are namespaces of this
machine and share its cores. Four workers on two hosts save every 20 steps; the third host is a spare. Each program has
a new cluster in each round, on which the faults follow one another. The host of the last rank is killed; its network is
cut; it is drained (Trainshed only); the head is killed. Plain Ray runs with its default health checks. Its driver ends
with the head, and is restarted when the nodes are back.
"""

import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml

from benchmarks.faults.hosts_run import EVERY, WORKER
from benchmarks.harness import Sample, command_line, compare, markdown_table, parse, write_result
from benchmarks.workload import TOY, Workload
from service.domain.jobs.job import JobState
from tests.support.hosts.host_cluster import HostCluster
from tests.support.hosts.hosts import SHARED, Host, lab, why_no_hosts
from tests.support.waiting import wait_for
from train_loop.run_dir import read_lines_after

RAY, OURS = "Ray TorchTrainer around the bare loop", "Trainshed, POST /jobs"
HOST_KILLED, CABLE_CUT = "host killed, spare there", "cable cut, spare there"
DRAINED, HEAD_LOST = "host drained, 60 s notice", "head killed, from the nodes' return"
FAULTS = (HOST_KILLED, CABLE_CUT, DRAINED, HEAD_LOST)
PARTS = ("detect", "restart", "load", "replay")
NODES, SETTLED, QUICKLY, LIMIT = 3, 50.0, 3.0, 300.0
"""Hosts with workers; seconds of training before each fault, the same with --quick, and the limit of a recovery."""
Line = dict[str, Any]


class LogChunk:
    """A reader of a growing JSON lines file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """Return all lines up to now."""
        new, self._offset = read_lines_after(self._path, self._offset)
        self.lines += new
        return self.lines


class Program(Protocol):
    """A training program that runs on a cluster."""

    cluster: HostCluster

    def steps(self) -> list[Line]:
        """Return a line with `step` and `time` for each finished step, including repeated ones."""
        ...

    def victim(self) -> Host:
        """Return the host of the last rank."""
        ...

    def marks(self, since: float) -> dict[str, float | None]:
        """Return the times after `since` of the detected loss (`lost`) and of the next group (`ready`, `loaded`)."""
        ...

    def nodes_are_back(self) -> None:
        """React to the complete cluster after the loss of its head."""
        ...


class Plain:
    """A TorchTrainer configured as in its guide."""

    def __init__(self, cluster: HostCluster, folder: Path) -> None:
        self.cluster = cluster
        here = cluster.lab.shared / "plain"
        here.mkdir()
        self._marks = LogChunk(here / "marks.jsonl")
        self._paths = [f"{SHARED}/{path.relative_to(cluster.lab.shared)}" for path in (folder, here)]
        self._start()

    def _start(self) -> None:
        """Start the driver. It resumes from the newest checkpoint if there is one."""
        command = ("python", "-m", "benchmarks.faults.hosts_run", *self._paths)
        self.cluster.head.spawn(*command, log="driver", env=self.cluster.ray_env)

    def nodes_are_back(self) -> None:
        """Restart the driver, as an attentive operator would."""
        self.cluster.head.run("pkill", "-9", "-f", "[b]enchmarks.hosts_run", check=False)
        self._start()

    def steps(self) -> list[Line]:
        """Return the steps of rank 0."""
        return [line for line in self._marks.read() if line["what"] == "step"]

    def victim(self) -> Host:
        """Return the host of the last rank of the newest group."""
        ready = [line for line in self._marks.read() if line["what"] == "ready"]
        last = max(line["rank"] for line in ready)
        return self.cluster.lab.hosts[[line["host"] for line in ready if line["rank"] == last][-1]]

    def marks(self, since: float) -> dict[str, float | None]:
        """Return the marks of the controller and of rank 0."""
        after = [line for line in self._marks.read() if line["time"] > since]
        names = ("lost", "ready", "loaded")
        found = {
            what: [line["time"] for line in after if line["what"] == what and line.get("rank", 0) == 0]
            for what in names
        }
        return {what: times[0] if times else None for what, times in found.items()}


class Ours:
    """A job of the service."""

    def __init__(self, cluster: HostCluster, workload: Workload, folder: Path, *, max_steps: int | None = None) -> None:
        self.cluster = cluster
        here = Path(SHARED, folder.relative_to(cluster.lab.shared))
        spec = workload.spec(
            here,
            checkpoint={"every_steps": EVERY},
            scaling={"resources_per_worker": WORKER},
            failure={"max_failures": 100, "max_attempts": 100},
            training={"max_steps": max_steps or workload.steps},
        )
        self.job_id = cluster.client.submit(yaml.safe_dump(spec)).id
        self._attempts: dict[int, tuple[LogChunk, LogChunk]] = {}

    def _read(self, file: int) -> list[Line]:
        for attempt in self.cluster.run_dir(self.job_id).attempts():
            if attempt.number not in self._attempts:
                self._attempts[attempt.number] = LogChunk(attempt.metrics), LogChunk(attempt.events)
        return [line for tails in self._attempts.values() for line in tails[file].read()]

    def steps(self) -> list[Line]:
        """Return the metrics lines."""
        return self._read(0)

    def events(self, name: str, since: float = 0.0) -> list[Line]:
        """Return the events of a name, after a time."""
        return [line for line in self._read(1) if line["event"] == name and line["time"] > since]

    def victim(self) -> Host:
        """Return the host of the last rank of the newest group."""
        hosts = self.cluster.hosts_of(self.job_id)
        return hosts[max(hosts)]

    def marks(self, since: float) -> dict[str, float | None]:
        """Return the times of the events."""
        names = {"lost": "workers_lost", "ready": "workers_ready", "loaded": "training_started"}
        found = {what: self.events(name, since) for what, name in names.items()}
        return {what: lines[0]["time"] if lines else None for what, lines in found.items()}

    def nodes_are_back(self) -> None:
        """Do nothing: the service starts the next attempt."""

    def cancel(self) -> None:
        """Cancel the job."""
        self.cluster.client.cancel(self.job_id, grace_seconds=0, checkpoint=False)
        self.cluster.wait_for_state(self.job_id, JobState.CANCELLED)


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__), rounds=3)
    why = why_no_hosts()
    if why is not None:
        raise SystemExit(why)
    settled = QUICKLY if arguments.quick else SETTLED
    workload = Workload(config=TOY, world=4, sequence_length=32, steps=40_000)
    found: dict[str, list[Sample]] = defaultdict(list)
    for number in range(arguments.rounds):
        runs = {RAY: functools.partial(run_plain, workload), OURS: functools.partial(run_ours, workload)}
        for name in sorted(runs, reverse=bool(number % 2)):
            for fault, value, raw in runs[name](settled, quick=arguments.quick):
                found[fault].append(Sample(name, number, value, raw=raw))
                print(f"round {number + 1} of {arguments.rounds}, {fault}, {name}: {value:.1f} {raw}", flush=True)
    write_result(
        "hosts",
        settings=workload.model_dump()
        | {"rounds": arguments.rounds, "quick": arguments.quick, "every": EVERY, "settled": settled, "nodes": NODES},
        data=[{"fault": fault, "sample": sample} for fault, samples in found.items() for sample in samples],
        table=table(found),
        folder=arguments.results,
    )


def table(found: dict[str, list[Sample]]) -> str:
    """Return a Markdown table with a row for each fault and program."""
    rows = [(fault, name) for fault, samples in found.items() for name in sorted({one.variant for one in samples})]
    return markdown_table([record(fault, name, found[fault]) for fault, name in rows])


def record(fault: str, name: str, samples: list[Sample]) -> dict[str, Any]:
    """Return a table row."""
    mine = [sample for sample in samples if sample.variant == name]
    row: dict[str, Any] = {"fault": fault, "program": name}
    values = [sample.value for sample in mine if sample.value is not None]
    row["seconds to a new step, median"] = f"{np.median(values):.1f}"
    row["least to most"] = f"{min(values):.1f} to {max(values):.1f}"
    if any(sample.variant == RAY for sample in samples):
        (compared,) = (one for one in compare(samples, RAY) if one.variant == name)
        row["ratio to Ray, median [95 % interval]"] = compared.ratio_text
    for part in (*PARTS, "steps repeated"):
        known = [sample.raw[part] for sample in mine if sample.raw.get(part) is not None]
        row[part] = f"{np.median(known):.1f}" if known else None
    return row


Found = Iterator[tuple[str, float, dict[str, Any]]]


@contextmanager
def cluster_of(workload: Workload, *, without: tuple[str, ...] = ()) -> Iterator[tuple[HostCluster, Path]]:
    """Run hosts with Ray's units for the body; yield the cluster and the workload's folder on shared storage."""
    names = ["head", *(f"node{number}" for number in range(1, NODES + 1))]
    with tempfile.TemporaryDirectory(prefix="shared-", dir="/var/tmp", ignore_cleanup_errors=True) as shared:
        folder = Path(shared, "data", "workload")
        workload.write(folder)
        with lab(names, shared=Path(shared)) as made:
            cluster = HostCluster(made, without=without)
            try:
                cluster.start_head()
                for node in cluster.nodes:
                    cluster.start_node(node)
                cluster.wait_for_nodes(NODES)
                yield cluster, folder
            finally:
                cluster.close()


def run_plain(workload: Workload, settled: float, *, quick: bool) -> Found:
    """Yield each fault of plain Ray with its seconds and their parts."""
    with cluster_of(workload, without=("RAY_health", "RAY_gcs")) as (cluster, folder):
        program = Plain(cluster, folder)
        yield HOST_KILLED, *after_kill(program, settled)
        if not quick:
            switch_on(program)
            yield CABLE_CUT, *after_cut(program, settled)
            yield HEAD_LOST, *after_head(program, settled)


def run_ours(workload: Workload, settled: float, *, quick: bool) -> Found:
    """Yield each fault of a job of the service with its seconds and their parts, including a drain."""
    with cluster_of(workload) as (cluster, folder):
        cluster.start_service()
        program = Ours(cluster, workload, folder)
        yield HOST_KILLED, *after_kill(program, settled)
        if not quick:
            switch_on(program)
            yield CABLE_CUT, *after_cut(program, settled)
            yield DRAINED, *after_drain(program, settled)
            yield HEAD_LOST, *after_head(program, settled)
        program.cancel()


def after_kill(program: Program, settled: float) -> tuple[float, dict[str, Any]]:
    """Kill the host of the last rank. Return the seconds to recovery and their parts."""
    before = the_moment(program, settled)
    hit = time.time()
    program.victim().kill()
    return recovered(program, hit, before)


def switch_on(program: Program) -> None:
    """Start all hosts that are off, and wait for them."""
    for host in program.cluster.nodes:
        if not host.is_on:
            host.start()
            program.cluster.start_node(host)
    program.cluster.wait_for_nodes(NODES, seconds=LIMIT)


def after_cut(program: Program, settled: float) -> tuple[float, dict[str, Any]]:
    """Cut the network of the last rank's host until recovery. Return the seconds and their parts."""
    before, host = the_moment(program, settled), program.victim()
    hit = time.time()
    host.cut()
    found = recovered(program, hit, before)
    host.heal()
    program.cluster.wait_for_nodes(NODES, seconds=LIMIT)
    return found


def after_drain(program: Ours, settled: float) -> tuple[float, dict[str, Any]]:
    """Drain the host of the last rank, and kill it after the job has moved. Return the seconds and their parts."""
    before, host = the_moment(program, settled), program.victim()
    hit = time.time()
    program.cluster.drain(host, seconds=60)
    wait_for(lambda: program.events("training_started", hit), "the move", seconds=LIMIT)
    # The run continues to train after the notice.
    before = max(line["step"] for line in program.steps() if line["time"] < program.marks(hit)["ready"])
    found = recovered(program, hit, before)
    host.kill()
    switch_on(program)
    return found


def after_head(program: Program, settled: float) -> tuple[float, dict[str, Any]]:
    """Kill the control plane of Ray. Return the seconds from the return of the last node, and their parts."""
    before = the_moment(program, settled)
    hit = time.time()
    program.cluster.head.run("pkill", "-9", "-f", "gcs_server")
    wait_for(lambda: len(program.cluster.listed()) < NODES, "the loss of the head", seconds=LIMIT)
    program.cluster.wait_for_nodes(NODES, seconds=LIMIT)
    back = time.time()
    program.nodes_are_back()
    seconds, raw = recovered(program, hit, before)
    return hit + seconds - back, raw | {"from the kill": seconds, "nodes were back after": back - hit}


def the_moment(program: Program, settled: float) -> int:
    """Wait until the run has trained for `settled` seconds and is midway between saves; return its newest step."""
    begun = len(program.steps())

    def now() -> int | None:
        lines = program.steps()
        if len(lines) == begun or lines[-1]["time"] - lines[begun]["time"] < settled:
            return None
        step = int(lines[-1]["step"])
        return step if step > 2 * EVERY and abs(step % EVERY - EVERY // 2) <= 2 else None

    return wait_for(now, "the moment of the fault", seconds=LIMIT)


def recovered(program: Program, hit: float, before: int) -> tuple[float, dict[str, Any]]:
    """Wait for the first new step of a newer group. Return the seconds since the fault, and their parts."""

    def first_new() -> Line | None:
        ready = program.marks(hit)["ready"]
        if ready is None:
            return None
        done = max((line["step"] for line in program.steps() if line["time"] < ready), default=before)
        return next((line for line in program.steps() if line["time"] > ready and line["step"] > done), None)

    new = wait_for(first_new, "a new step", seconds=LIMIT)
    marks = program.marks(hit)
    ready, loaded = marks["ready"], marks["loaded"]
    assert ready is not None
    assert loaded is not None
    lost = marks["lost"] if marks["lost"] is not None and marks["lost"] < ready else None
    repeated = sum(1 for line in program.steps() if line["time"] > ready and line["step"] < new["step"])
    return new["time"] - hit, {
        "detect": None if lost is None else lost - hit,
        "restart": ready - (lost or hit),
        "load": loaded - ready,
        "replay": new["time"] - loaded,
        "steps repeated": repeated,
    }


if __name__ == "__main__":
    main()
