"""Choice of a run's micro-batch: the largest that fits by the plan, or the next smaller one. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from train_loop.plan.forecast.fit import RankMemory, fits_rank
from train_loop.plan.mesh import divisors
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.plan import plan_job
from train_loop.spec import JobSpec


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of a micro-batch that a worker group has chosen, and for what."""

    size: int
    device: str
    """Device of the workers, on which the choice is kept."""
    workers: int
    because: Literal["plan", "kept", "out_of_memory"] = "plan"
    """The largest that fits by the plan; that of an earlier group; or the next smaller after one lacked memory."""


def sized(spec: JobSpec, size: int) -> JobSpec:
    """Return a spec with a number of sequences in a micro-batch."""
    training = spec.training.model_copy(update={"per_device_train_batch_size": size})
    return spec.model_copy(update={"training": training})


def choose_micro_batch(
    spec: JobSpec, shape: ModelShape, memory: RankMemory, *, before: MicroBatch | None, failed: Collection[int] = ()
) -> MicroBatch:
    """Choose the micro-batch of a worker group, at the spec's global batch. Every size divides a rank's share of it.

    `before` is the choice of the group before, which a group on the same device and of the same size keeps. `failed`
    are sizes with which groups ran out of memory: of smaller ones, the largest is chosen. 1 is chosen if none fits.
    """
    sizes = divisors(plan_job(sized(spec, 1), shape).batch.per_data_rank)
    workers, device = spec.scaling.world, memory.device
    if failed:
        smaller = [one for one in sizes if one < min(failed)]
        return MicroBatch(max(smaller, default=1), device, workers, "out_of_memory")
    if before is not None and (before.device, before.workers) == (device, workers) and before.size in sizes:
        return MicroBatch(before.size, device, workers, "kept")
    fitting = (one for one in reversed(sizes) if _fits(sized(spec, one), shape, memory))
    return MicroBatch(next(fitting, 1), device, workers)


def _fits(spec: JobSpec, shape: ModelShape, memory: RankMemory) -> bool:
    return fits_rank(spec, plan_job(spec, shape), memory)
