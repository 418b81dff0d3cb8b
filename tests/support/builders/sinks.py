"""Runs with metrics, and the values that TensorBoard shows for them."""

from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.builders.specs import spec
from train_loop.run_dir import JsonLines, RunDir


def a_run(root: Path, steps: Iterable[int] = (), *, attempt: int = 1) -> RunDir:
    """Return a run directory with these steps."""
    run_dir = RunDir(root)
    run_dir.write_spec(spec())
    log_steps(run_dir, steps, attempt=attempt)
    return run_dir


def log_steps(run_dir: RunDir, steps: Iterable[int], *, attempt: int = 1, extra: float = 0.0) -> None:
    """Write metrics lines as rank 0 does; the loss of a step is its number and `extra`, its time 1000 s later."""
    lines = JsonLines(run_dir.attempt(attempt).metrics, attempt=attempt)
    for step in steps:
        lines.append(time=1000.0 + step, step=step, loss=step + extra, mfu=None, rank_seconds=[1.0], eval_loss=2.0)
    lines.flush()


def shown(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """Return the steps and values that TensorBoard shows under a tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def as_logged(steps: Iterable[int], *, extra: float = 0.0) -> list[tuple[int, float]]:
    """Return the expected steps and values."""
    return [(step, step + extra) for step in steps]
