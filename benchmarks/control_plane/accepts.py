"""Durably accepted jobs/s: Trainshed, with checks, against a bare FastAPI route and Ray's job API.

`python -m benchmarks.control_plane.accepts [--rounds N] [--quick]`. Eight connections repeatedly send the same spec to
a service on SQLite whose cluster does not answer, so that accepted jobs stay queued. At the end of each start the
service is killed with SIGKILL while it receives more jobs, and restarted: every job with a 201 response must still
exist.
"""

import functools
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.harness import (
    Measured,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    ratios_of,
    write_result,
)
from benchmarks.launch import ProgramError, end, last_words, run_for_json, start_module
from benchmarks.workload import TOY, Workload
from examples.demo import service
from trainshed import Api, ApiError

BARE, OURS, RAY = "bare FastAPI route, SQLite commit", "Trainshed, POST /jobs", "Ray JobSubmissionClient"
NOBODY = "http://127.0.0.1:9"
"""Address without a cluster."""
WARM, LIMIT = 80, 60.0


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    count, few = (160, 4) if arguments.quick else (4000, 16)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        ways: dict[str, Callable[[Path], Measured]] = {
            BARE: functools.partial(bare, count=count),
            OURS: functools.partial(ours, count=count),
            RAY: functools.partial(ray, count=few),
        }

        def measured(way: Callable[[Path], Measured]) -> Measured:
            with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
                return way(Path(here))

        samples = interleave({name: functools.partial(measured, way) for name, way in ways.items()}, arguments.rounds)
    write_result(
        "accepts",
        settings={"rounds": arguments.rounds, "quick": arguments.quick, "jobs": count, "jobs_ray": few},
        data=samples,
        table=markdown_table(list(records(samples))),
        folder=arguments.results,
    )


def records(samples: list[Sample]) -> Iterator[dict[str, str | None]]:
    """Yield a table row for each program."""
    ratios = ratios_of(OURS, samples)
    for row in compare(samples, BARE):
        lost = [sample.raw["lost"] for sample in samples if sample.variant == row.variant and "lost" in sample.raw]
        sent = [sample.raw["sent"] for sample in samples if sample.variant == row.variant and "sent" in sample.raw]
        yield {
            "program": row.variant,
            "jobs/s, median": row.error if row.median is None else f"{row.median:,.1f}",
            "ratio to the bare route, median [95 % interval]": row.ratio_text,
            f"{OURS} ÷ it": ratios.get(row.variant),
            "lost after SIGKILL": f"{sum(lost)} of {sum(sent)}" if sent else None,
        }


def bare(here: Path, *, count: int) -> Measured:
    """Measure one start of the bare route. Raises ProgramError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = here / "log"
    process = start_module("benchmarks.peers.fastapi_sqlite", here / "jobs.db", port, log=log)
    try:
        _wait_for_port(port, process, log)
        return Measured(speed(here, f"http://127.0.0.1:{port}", "", count))
    finally:
        end(process)


def ours(here: Path, *, count: int) -> Measured:
    """Measure one start of the service, then kill it and count lost jobs. Raises ProgramError."""
    with waiting_service(here) as (client, url):
        key = (here / "admin.key").read_text().strip()
        value = speed(here, url, key, count)
        found = here / "killed.json"
        load = start_module(
            "benchmarks.control_plane.accepts_run", found, url, key, spec(here), count, log=here / "load.log"
        )
        _wait_for_more(client, count)
        service_of(here).kill()
        load.wait(LIMIT)
    accepted = json.loads(found.read_bytes())["ids"]
    with waiting_service(here) as (client, _):
        lost = sum(not exists(client, job_id) for job_id in accepted)
    return Measured(value, {"sent": len(accepted), "lost": lost})


def ray(here: Path, *, count: int) -> Measured:
    """Measure one start of a separate Ray cluster. Raises ProgramError."""
    found = run_for_json("benchmarks.control_plane.accepts_ray", count, here=here)
    return Measured(count / found["seconds"], {"supervisor_bytes": found["supervisor_bytes"]})


@contextmanager
def waiting_service(here: Path) -> Iterator[tuple[Api, str]]:
    """Run a service whose cluster does not answer, so that jobs stay queued."""
    with service(here, TRAINSHED_RAY_ADDRESS=NOBODY, RAY_AUTH_MODE="disabled") as found:
        yield found


def service_of(home: Path) -> psutil.Process:
    """Return the process of a running service."""
    return psutil.Process(json.loads((home / "service.json").read_bytes())["pid"])


def speed(here: Path, url: str, key: str, count: int) -> float:
    """Return accepted jobs/s after a warm-up. Raises ProgramError."""
    for number in (WARM, count):
        found = run_for_json("benchmarks.control_plane.accepts_run", url, key, spec(here), number, here=here)
        if len(found["ids"]) < number:
            raise ProgramError(f"{len(found['ids'])} of {number} were accepted")
    return float(count / found["seconds"])


def spec(here: Path) -> Path:
    """Write the spec of the submitted job, a toy model on Python's sources; return its file."""
    file = here / "spec.json"
    raw = Workload(config=TOY).spec(here) | {"data": {"train": {"path": "stdlib://json/*.py"}, "sequence_length": 64}}
    file.write_text(json.dumps(raw))
    return file


def exists(client: Api, job_id: str) -> bool:
    """Return whether the service has the job."""
    try:
        return client.job(job_id).id == job_id
    except ApiError as error:
        if error.problem.status != 404:
            raise
        return False


def _wait_for_more(client: Api, count: int) -> None:
    """Wait until some jobs of the second batch are accepted."""
    (newest,) = client.jobs(limit=1).data
    deadline = time.monotonic() + LIMIT
    while len([job for job in client.jobs(limit=100).data if job.id > newest.id]) < min(count // 8, 100):
        if time.monotonic() > deadline:
            raise ProgramError("the service accepted no jobs of the second batch")
        time.sleep(0.01)


def _wait_for_port(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise ProgramError(f"the route did not answer: {last_words(log)}")


if __name__ == "__main__":
    main()
