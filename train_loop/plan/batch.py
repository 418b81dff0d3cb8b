"""Arithmetic of batches: sequences per optimizer step, and steps of a run."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from train_loop.plan.data_facts import SampleCount
from train_loop.spec import Problem, TrainingSpec
from train_loop.spec.schedule import check_steps

End = Literal["max_steps", "num_train_epochs", "max_tokens"]
"""A setting that ends a run."""


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of one optimizer step, in sequences."""

    per_device: int
    accumulation: int
    dp: int

    @property
    def global_batch(self) -> int:
        """Return the sequences per optimizer step."""
        return self.per_device * self.accumulation * self.dp

    @property
    def per_data_rank(self) -> int:
        """Return the sequences per optimizer step and data-parallel rank."""
        return self.per_device * self.accumulation


class Origin(NamedTuple):
    """The start of a run: its first step, or the checkpoint of another run from which it resumes."""

    step: int = 0
    tokens: int = 0
    consumed: int = 0
    """Samples taken from the run's data order."""


START = Origin()


class PlannedEnd(NamedTuple):
    """The end of a run, as far as it is known before the data is prepared."""

    steps: int | None
    """Optimizer steps; None if the number of samples or tokens decides, and is not known exactly."""
    by: End | None
    """The setting that ends the run; None if that is not known."""


UNKNOWN_END = PlannedEnd(None, None)


def plan_batch(training: TrainingSpec, *, dp: int) -> BatchPlan:
    """Plan the sequences per step from either of the two settings.

    Raises ValueError if the micro-batches of all data-parallel ranks do not divide global_batch_size.
    """
    per_device = training.micro_batch
    if training.global_batch_size is None:
        return BatchPlan(per_device, training.gradient_accumulation_steps or 1, dp)
    accumulation, rest = divmod(training.global_batch_size, per_device * dp)
    if rest or accumulation == 0:
        unit = per_device * dp
        below = max(training.global_batch_size // unit, 1) * unit
        raise ValueError(
            f"global_batch_size={training.global_batch_size} is not a multiple of per_device_train_batch_size="
            f"{per_device} x {dp} data-parallel ranks; choose {below} or {below + unit}"
        )
    return BatchPlan(per_device, accumulation, dp)


def plan_steps(training: TrainingSpec, *, samples: int, tokens: int, global_batch: int, origin: Origin = START) -> int:
    """Return the run's last optimizer step: max_steps, or every sample once per epoch with the last step padded.

    If both end the run, the earlier end counts. For max_tokens it is an estimate by the mean length of the dataset's
    samples; `tokens` counts all their tokens.
    """
    if training.max_tokens is not None:
        left = max(training.max_tokens - origin.tokens, 0)
        return origin.step + math.ceil(left * samples / (tokens * global_batch))
    ends = _steps_of_ends(training, samples=samples, global_batch=global_batch, origin=origin)
    return min(ends.values())


def plan_end(training: TrainingSpec, *, samples: int, global_batch: int, origin: Origin = START) -> End:
    """Return the setting that ends the run: the earlier of max_steps and num_train_epochs."""
    if training.max_tokens is not None:
        return "max_tokens"
    ends = _steps_of_ends(training, samples=samples, global_batch=global_batch, origin=origin)
    return min(ends, key=lambda name: ends[name])


def _steps_of_ends(training: TrainingSpec, *, samples: int, global_batch: int, origin: Origin) -> dict[End, int]:
    """Return the last optimizer step by each of the settings that end the run."""
    ends: dict[End, int] = {} if training.max_steps is None else {"max_steps": training.max_steps}
    if training.epochs is not None:
        left = max(math.ceil(training.epochs * samples) - origin.consumed, 0)
        ends["num_train_epochs"] = origin.step + math.ceil(left / global_batch)
    return ends


def plan_samples(training: TrainingSpec, *, samples: int, global_batch: int, origin: Origin = START) -> int:
    """Return the position in the run's data order at which it ends, including repeats in later epochs.

    The last step may be short. For max_tokens it is an upper bound, even if every step has a single token.
    """
    if training.max_tokens is not None:
        return origin.consumed + max(training.max_tokens - origin.tokens, 0) * global_batch
    ends = list[int]()
    if training.max_steps is not None:
        ends.append(origin.consumed + max(training.max_steps - origin.step, 0) * global_batch)
    if training.epochs is not None:
        ends.append(math.ceil(training.epochs * samples))
    return min(ends)


def check_schedule(
    training: TrainingSpec, count: SampleCount | None, *, global_batch: int
) -> tuple[PlannedEnd, list[Problem]]:
    """Return the end of a new run, and the problems of its schedule; `count` is None if its samples are not known."""
    if training.max_tokens is not None:
        return PlannedEnd(None, "max_tokens"), []
    if count is None:
        if training.epochs is None:
            return PlannedEnd(training.max_steps, "max_steps"), []
        return PlannedEnd(None, "num_train_epochs" if training.max_steps is None else None), []
    steps = plan_steps(training, samples=count.samples, tokens=1, global_batch=global_batch)
    warmup = training.warmup_of(steps)
    try:
        check_steps(training.lr_scheduler_kwargs, warmup_steps=warmup, steps=steps)
    except ValueError as error:
        pointer = "/training/warmup_steps" if warmup else "/training/lr_scheduler_kwargs"
        return UNKNOWN_END, [Problem(pointer, str(error))]
    by = plan_end(training, samples=count.samples, global_batch=global_batch)
    if count.exact or training.epochs is None:
        return PlannedEnd(steps, by), []
    # The epochs may be shorter.
    return PlannedEnd(None, by if by == "num_train_epochs" else None), []
