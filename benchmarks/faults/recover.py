"""Seconds from SIGKILL of a rank to the first new step: Trainshed against a plain Ray TorchTrainer and torchrun.

`python -m benchmarks.faults.recover [--rounds N] [--quick]`. Two workers save every ten steps. Rank 1 is killed midway
between two saves, after 35 s of training. A new step is a step that was not done before the kill.
"""

import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from benchmarks.faults.recover_run import EVERY
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
from benchmarks.launch import ProgramError, end, expect_starts, last_words, start_module
from benchmarks.workload import TOY, Workload
from examples.demo import service
from train_loop.run_dir import RunDir, read_lines

RAY, TORCHRUN, OURS = (
    "Ray TorchTrainer around the bare loop",
    "torchrun --max-restarts 1, bare loop",
    "Trainshed, POST /jobs",
)
PARTS = ("detect", "restart", "load", "replay")
SETTLED, QUICKLY, STEPS = 35.0, 3.0, 10_000
"""Seconds of training before the kill, the same with --quick, and the planned steps of a run."""
LIMIT, POLL = 300.0, 0.02
Line = dict[str, Any]
Way = Callable[[Workload, Path, Path, float], Measured]


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    settled = QUICKLY if arguments.quick else SETTLED
    toy = Workload(config=TOY, sequence_length=32, steps=STEPS)
    workload = toy if arguments.quick else Workload(sequence_length=128, steps=STEPS)
    ways: dict[str, Way] = {
        RAY: functools.partial(bare_loop, under_ray=True),
        TORCHRUN: functools.partial(bare_loop, under_ray=False),
        OURS: ours,
    }
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        workload.write(Path(root, "workload"))

        def measured(way: Way) -> Measured:
            with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
                return way(workload, Path(root, "workload"), Path(here), settled)

        samples = interleave({name: functools.partial(measured, way) for name, way in ways.items()}, arguments.rounds)
    write_result(
        "recover",
        settings=workload.model_dump()
        | {"rounds": arguments.rounds, "quick": arguments.quick, "every": EVERY, "settled": settled},
        data=samples,
        table=markdown_table([record(name, samples) for name in ways]),
        folder=arguments.results,
    )


def record(name: str, samples: list[Sample]) -> dict[str, Any]:
    """Return a table row."""
    (row,) = (row for row in compare(samples, RAY) if row.variant == name)
    mine = [sample.raw for sample in samples if sample.variant == name and sample.value is not None]
    parts = {part: [raw[part] for raw in mine if raw[part] is not None] for part in PARTS}
    return {
        "program": name,
        "seconds, median": None if row.median is None else f"{row.median:.1f}",
        "ratio to Ray, median [95 % interval]": row.ratio_text,
    } | {part: f"{np.median(found):.1f}" if found else None for part, found in parts.items()}


def bare_loop(workload: Workload, folder: Path, here: Path, settled: float, *, under_ray: bool) -> Measured:
    """Measure one start of the bare loop in which rank 1 is killed. Raises ProgramError."""
    log = here / "log"
    if under_ray:
        process = start_module("benchmarks.faults.recover_run", folder, here, "ray", log=log)
    else:
        process = start_module(
            "benchmarks.faults.recover_run",
            folder,
            here,
            log=log,
            ranks=workload.world,
            restarts=1,
            # torch 2.13 reuses the store of the first rendezvous, with addresses of dead ranks: gloo would fail.
            variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
    try:
        marks = functools.partial(lambda path: list(read_lines(path)), here / "marks.jsonl")
        wait(lambda: is_the_moment([line for line in marks() if "step" in line], settled), process, log)
        (victim,) = (line["pid"] for line in marks() if line["what"] == "ready" and line["rank"] == 1)
        killed = kill(victim)
        before = max(line.get("step", 0) for line in marks())
        wait(lambda: any(line.get("step", 0) > before for line in marks()), process, log)
    finally:
        end(process)
    after = [line for line in marks() if line["time"] > killed]
    return spans(
        killed,
        lost=first(after, what="lost"),
        ready=first(after, what="ready", rank=0),
        loaded=first(after, what="loaded", rank=0),
        new=next(line["time"] for line in after if line.get("step", 0) > before),
    )


def ours(workload: Workload, folder: Path, here: Path, settled: float) -> Measured:
    """Measure one job on a new service in which rank 1 is killed. Raises ProgramError."""
    data = here / "runs" / "data"
    data.mkdir(parents=True)
    shutil.copy(folder / "tokens.parquet", data)
    spec = workload.spec(data, checkpoint={"every_steps": EVERY})
    with service(here) as (client, _):
        job = client.submit(yaml.safe_dump(spec))
        attempt = RunDir.at(job.run_dir).attempt(1)
        lines, events = (
            functools.partial(lambda path: list(read_lines(path)), p) for p in (attempt.metrics, attempt.events)
        )
        wait(lambda: is_the_moment(lines(), settled))
        expect_starts(job.run_dir, 1)
        (start,) = (event for event in events() if event["event"] == "training_started")
        killed = kill(start["workers"][1]["pid"])
        before = max(line["step"] for line in lines())
        wait(lambda: any(line["step"] > before for line in lines()))
        expect_starts(job.run_dir, 2)
        after_kill = [event for event in events() if event["time"] > killed]
        new = next(line["time"] for line in lines() if line["step"] > before)
        client.cancel(job.id, grace_seconds=0, checkpoint=False)
    return spans(
        killed,
        lost=first(after_kill, event="workers_lost"),
        ready=first(after_kill, event="workers_ready"),
        loaded=first(after_kill, event="training_started"),
        new=new,
    )


def is_the_moment(steps: list[Line], settled: float) -> bool:
    """Return whether the run has trained for `settled` seconds and is midway between two saves."""
    if not steps or steps[-1]["time"] - steps[0]["time"] < settled:
        return False
    return steps[-1]["step"] > EVERY and bool(steps[-1]["step"] % EVERY == EVERY // 2)


def kill(pid: int) -> float:
    """Kill a process with SIGKILL; return the Unix time."""
    psutil.Process(pid).kill()
    return time.time()


def first(lines: list[Line], **named: Any) -> float | None:
    """Return the time of the first line with these fields; None without one."""
    return next((line["time"] for line in lines if named.items() <= line.items()), None)


def spans(killed: float, *, lost: float | None, ready: float | None, loaded: float | None, new: float) -> Measured:
    """Return the seconds from the kill to the first new step, with their parts."""
    assert ready is not None
    assert loaded is not None
    parts = {
        "detect": None if lost is None else lost - killed,
        "restart": ready - (lost or killed),
        "load": loaded - ready,
        "replay": new - loaded,
    }
    return Measured(new - killed, parts)


def wait(
    condition: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None, log: Path | None = None
) -> None:
    """Wait until the condition is true. Raises ProgramError if the process exits, or after 300 s."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        if process is not None and log is not None and process.poll() is not None:
            raise ProgramError(f"the run exited with code {process.returncode}: {last_words(log)}")
        if time.monotonic() > deadline:
            raise ProgramError(f"the condition was not met within {LIMIT:g} s")
        time.sleep(POLL)


if __name__ == "__main__":
    main()
