"""The micro-batches that worker groups have chosen, by the events of a run. Torch-free: the controller reads them."""

from train_loop.plan import MicroBatch, sized
from train_loop.run_dir import RunDir
from train_loop.spec import AUTO, JobSpec
from train_loop.telemetry.event_log import read_attempts

CHOSEN = "micro_batch_chosen"
"""Name of the event of a choice."""
Group = tuple[int, int]
"""Attempt and epoch of a worker group."""


def choices(run_dir: RunDir) -> dict[Group, MicroBatch]:
    """Return the choices of a run's worker groups, the oldest first."""
    return {
        (int(line["attempt"]), int(line.get("epoch", 0))): MicroBatch(line["size"], line["device"], line["workers"])
        for line in read_attempts(run_dir)
        if line.get("event") == CHOSEN
    }


def newest_choice(run_dir: RunDir) -> MicroBatch | None:
    """Return the choice of the newest worker group that has made one."""
    *_, newest = choices(run_dir).values() or (None,)
    return newest


def smaller_is_left(spec: JobSpec, run_dir: RunDir) -> bool:
    """Return whether a worker group that ran out of memory is followed by one with smaller micro-batches."""
    if spec.training.per_device_train_batch_size != AUTO:
        return False
    newest = newest_choice(run_dir)
    return newest is not None and newest.size > 1


def as_chosen(spec: JobSpec, run_dir: RunDir) -> JobSpec:
    """Return a spec with the micro-batch of the newest worker group, if the workers choose it."""
    if spec.training.per_device_train_batch_size != AUTO or (newest := newest_choice(run_dir)) is None:
        return spec
    return sized(spec, newest.size)
