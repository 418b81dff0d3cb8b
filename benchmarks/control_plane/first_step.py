"""Seconds from submission to the end of the first optimizer step: Trainshed against `ray job submit`.

`python -m benchmarks.control_plane.first_step [--rounds N] [--quick]`. One Ray cluster and one service run throughout.
The jobs train the same small model on two workers, one job at a time. Trainshed also checks and stores its jobs.
"""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ray.job_submission import JobSubmissionClient

from benchmarks.faults.recover import Line, first, wait
from benchmarks.harness import (
    Measured,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    write_result,
)
from benchmarks.launch import ProgramError, environment, expect_starts
from benchmarks.workload import TOY, Workload
from examples.demo import service
from service.domain.jobs.job import JobState
from train_loop.run_dir import RunDir, read_lines
from trainshed import Api

CLI, CLIENT, OURS = "ray job submit", "Ray JobSubmissionClient.submit_job", "Trainshed, POST /jobs"
PARTS = ("answer", "driver", "workers", "build", "step")
STEPS = 10_000
"""More steps than a job reaches before it is stopped."""
CPUS = 3


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    workload = Workload(config=TOY, sequence_length=32, steps=STEPS)
    workload = workload if arguments.quick else Workload(sequence_length=128, steps=STEPS)
    with tempfile.TemporaryDirectory(prefix="shed-") as root, cluster(Path(root)) as url:
        workload.write(Path(root, "workload"))
        home = Path(root, "home")
        (home / "runs").mkdir(parents=True)
        shutil.copytree(Path(root, "workload"), home / "runs" / "data")
        with service(home, TRAINSHED_RAY_ADDRESS=url, RAY_AUTH_MODE="disabled", PATH=_path()) as (client, _):
            ways = {
                CLI: functools.partial(example, Path(root), url, by_hand=True),
                CLIENT: functools.partial(example, Path(root), url, by_hand=False),
                OURS: functools.partial(ours, client, workload.spec(home / "runs" / "data")),
            }
            # The first job on a cluster warms it up for the others.
            for way in [] if arguments.quick else ways.values():
                way()
            samples = interleave(ways, arguments.rounds)
    write_result(
        "first-step",
        settings=workload.model_dump() | {"rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=markdown_table([record(name, samples) for name in ways]),
        folder=arguments.results,
    )


def record(name: str, samples: list[Sample]) -> dict[str, Any]:
    """Return a table row."""
    (row,) = (row for row in compare(samples, CLI) if row.variant == name)
    mine = [sample.raw for sample in samples if sample.variant == name and sample.value is not None]
    return {
        "program": name,
        "seconds, median": None if row.median is None else f"{row.median:.2f}",
        f"ratio to {CLI}, median [95 % interval]": row.ratio_text,
    } | {part: f"{np.median([raw[part] for raw in mine]):.2f}" if mine else None for part in PARTS}


@contextlib.contextmanager
def cluster(root: Path) -> Iterator[str]:
    """Run a Ray head for the body; yield the address of its dashboard."""
    command = [sys.executable, "-m", "benchmarks.control_plane.first_step_cluster", str(CPUS), str(root / "address")]
    with (root / "ray.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.PIPE, env=_environment())
    try:
        wait((root / "address").exists, process, root / "ray.log")
        yield (root / "address").read_text()
    finally:
        # It shuts Ray down and exits when its standard input closes.
        process.communicate(timeout=60)


def example(root: Path, url: str, *, by_hand: bool) -> Measured:
    """Measure one job that is submitted to Ray, from the shell or by its client. Raises ProgramError."""
    here = Path(tempfile.mkdtemp(dir=root))
    entry = [sys.executable, "-m", "benchmarks.control_plane.first_step_run", str(root / "workload"), str(here)]
    command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--no-wait", "--address", url]
    marks = functools.partial(lambda path: list(read_lines(path)) if path.exists() else [], here / "marks.jsonl")
    began = time.time()
    if by_hand:
        name = here.name
        subprocess.run(
            [*command, "--submission-id", name, "--", *entry], env=_environment(), check=True, capture_output=True
        )
    else:
        name = JobSubmissionClient(url).submit_job(entrypoint=" ".join(entry), submission_id=here.name)
    answered = time.time()
    client = JobSubmissionClient(url)
    try:
        wait(lambda: any("step" in line for line in marks()))
    except ProgramError as error:
        raise ProgramError(f"{error}; {client.get_job_status(name)}: {client.get_job_logs(name)[-600:]}") from None
    client.stop_job(name)
    wait(lambda: client.get_job_status(name).is_terminal())
    return spans(began, answered, marks(), driver="driver", ready="ready", loaded="loaded")


def ours(client: Api, spec: dict[str, Any]) -> Measured:
    """Measure one job of the service. Raises ProgramError."""
    body, began = yaml.safe_dump(spec), time.time()
    job = client.submit(body)
    answered = time.time()
    attempt = RunDir.at(job.run_dir).attempt(1)
    wait(lambda: any(read_lines(attempt.metrics)))
    marks = [{"what": line["event"], **line} for line in read_lines(attempt.events)]
    marks += itertools.islice(read_lines(attempt.metrics), 1)
    expect_starts(job.run_dir, 1)
    client.cancel(job.id, grace_seconds=0, checkpoint=False)
    wait(lambda: client.job(job.id).state is JobState.CANCELLED)
    return spans(began, answered, marks, driver="attempt_started", ready="workers_ready", loaded="training_started")


def spans(began: float, answered: float, marks: list[Line], *, driver: str, ready: str, loaded: str) -> Measured:
    """Return the seconds from submission to the end of the first step, with their five parts."""
    moments = [first(marks, what=name) for name in (driver, ready, loaded)]
    step = min(line["time"] for line in marks if "step" in line and line.get("what") in (None, "step"))
    ends = [answered, *(moment for moment in moments if moment is not None), step]
    starts = [began, *ends[:-1]]
    return Measured(step - began, dict(zip(PARTS, (b - a for a, b in zip(starts, ends, strict=True)), strict=True)))


def _environment() -> dict[str, str]:
    return environment() | {"RAY_AUTH_MODE": "disabled", "PATH": _path()}


def _path() -> str:
    # Drivers on an external cluster are started as `python`.
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


if __name__ == "__main__":
    main()
