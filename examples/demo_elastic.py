"""`make demo-elastic`: kills and resizes a job, and checks that it ends with the bits of an undisturbed one.

The first job runs on four workers. One is killed, the job is resized to two workers, and one of them is killed. The
second job runs undisturbed on one worker. `trainshed diff` then compares all steps and the last checkpoint.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from examples.demo import (
    EXPECTED,
    RUN_LIMIT,
    DemoError,
    RunSummary,
    console,
    kill_a_worker,
    refresh,
    report,
    service,
    why,
)
from train_loop.spec import ScalingSpec
from trainshed import Api

SPEC = Path(__file__).with_name("elastic.yaml")
RESOURCES = {"CPU": 0.25}


def main() -> int:
    """Run the demo. Return 0 if both jobs have the same bits, else 1."""
    began = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="trainshed-demo-"))
    try:
        with service(home, TRAINSHED_RESIZE_SECONDS="3600") as (client, _):
            disturbed = disturb(client)
            alone = run_alone(client)
            faults = compare(home, disturbed, alone)
    except EXPECTED as error:
        faults = [str(error)]
    console.print(f"\nThe demo took {time.monotonic() - began:.0f} s. All its processes have exited.")
    return report(faults, home)


def disturb(client: Api) -> RunSummary:
    """Run the elastic job, with two kills and a resize between them."""
    summary = RunSummary(client.submit(SPEC.read_bytes()))
    console.print(f"[bold]Job[/] {summary.job.id} submitted from {SPEC.name}")
    wait(client, summary, lambda: trained_past_a_checkpoint(summary), "a checkpoint on four workers")
    kill_a_worker(summary)
    wait(client, summary, lambda: len(summary.named("training_started")) == 2, "a restart")
    wait(client, summary, lambda: trained_past_a_checkpoint(summary), "a checkpoint after the restart")
    console.print("  [bold yellow]resizing the job from four workers to two[/]")
    client.resume(summary.job.id, scaling=ScalingSpec(num_workers=2, resources_per_worker=RESOURCES))
    wait(client, summary, lambda: len(summary.named("training_started")) == 3, "a start with two workers")
    wait(client, summary, lambda: trained_past_a_checkpoint(summary), "a checkpoint on two workers")
    kill_a_worker(summary)
    finish(client, summary)
    worlds = [start["world"] for start in summary.named("training_started")]
    if worlds != [4, 4, 2, 2]:
        raise DemoError(f"the starts had {worlds} workers; expected 4, 4, 2 and 2")
    return summary


def run_alone(client: Api) -> RunSummary:
    """Run the same job undisturbed, on one worker."""
    spec = yaml.safe_load(SPEC.read_bytes())
    spec["scaling"]["num_workers"] = 1
    summary = RunSummary(client.submit(yaml.safe_dump(spec)))
    console.print(f"[bold]Job[/] {summary.job.id} submitted for one worker")
    finish(client, summary)
    if (starts := len(summary.named("training_started"))) != 1:
        raise DemoError(f"{summary.job.id} started {starts} times; expected 1, as nothing has disturbed it")
    return summary


def compare(home: Path, disturbed: RunSummary, alone: RunSummary) -> list[str]:
    """Run `trainshed diff`; return a fault if the jobs differ."""
    jobs = disturbed.job.id, alone.job.id
    console.print(f"[bold]trainshed diff[/] {jobs[0]} {jobs[1]}")
    command = [sys.executable, "-m", "trainshed", "diff", *jobs]
    found = subprocess.run(command, env=os.environ | {"TRAINSHED_HOME": str(home)}, capture_output=True, text=True)
    console.print(f"  {found.stdout}{found.stderr}", markup=False)
    return [] if found.returncode == 0 else ["the jobs have different bits"]


def finish(client: Api, summary: RunSummary) -> None:
    """Wait for the end of a job. Raises DemoError unless it has succeeded."""
    wait(client, summary, lambda: summary.job.state.terminal, "the end of the job")
    if summary.job.state != "SUCCEEDED":
        raise DemoError(f"{summary.job.id} ended as {summary.job.state}: {why(summary.job)}")


def wait(client: Api, summary: RunSummary, condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition of the job, and print its news. Raises DemoError if it ends or takes too long."""
    deadline = time.monotonic() + RUN_LIMIT
    refresh(client, summary)
    while not condition():
        if time.monotonic() > deadline or summary.job.state.terminal:
            raise DemoError(f"{summary.job.id} is {summary.job.state} before {what}: {why(summary.job)}")
        time.sleep(0.1)
        refresh(client, summary)


def trained_past_a_checkpoint(summary: RunSummary) -> bool:
    """Return whether the newest start has committed a checkpoint and trained a step after it."""
    begun = summary.named("training_started")[-1:]
    committed = [one for one in summary.named("checkpoint_committed") if begun and one["time"] > begun[0]["time"]]
    return bool(committed) and summary.metrics[-1]["step"] > committed[-1]["step"]


if __name__ == "__main__":
    sys.exit(main())
