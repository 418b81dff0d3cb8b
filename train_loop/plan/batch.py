"""Arithmetic of batches: sequences per optimizer step, and steps of a run."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from train_loop.plan.data_facts import SampleCount
from train_loop.spec import Problem, TrainingSpec
from train_loop.spec.schedule import check_steps


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


def plan_batch(training: TrainingSpec, *, dp: int) -> BatchPlan:
    """Plan the sequences per step from either of the two settings.

    Raises ValueError if the micro-batches of all data-parallel ranks do not divide global_batch_size.
    """
    per_device = training.per_device_train_batch_size
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

    For max_tokens it is an estimate by the mean length of the dataset's samples; `tokens` counts all their tokens.
    """
    if training.max_steps is not None:
        return training.max_steps
    if training.max_tokens is not None:
        left = max(training.max_tokens - origin.tokens, 0)
        return origin.step + math.ceil(left * samples / (tokens * global_batch))
    left = max(math.ceil((training.num_train_epochs or 1) * samples) - origin.consumed, 0)
    return origin.step + math.ceil(left / global_batch)


def plan_samples(training: TrainingSpec, *, samples: int, global_batch: int, origin: Origin = START) -> int:
    """Return the position in the run's data order at which it ends, including repeats in later epochs.

    The last step may be short. For max_tokens it is an upper bound, even if every step has a single token.
    """
    if training.max_steps is not None:
        return origin.consumed + max(training.max_steps - origin.step, 0) * global_batch
    if training.max_tokens is not None:
        return origin.consumed + max(training.max_tokens - origin.tokens, 0) * global_batch
    return math.ceil((training.num_train_epochs or 1) * samples)


def check_schedule(
    training: TrainingSpec, count: SampleCount, *, global_batch: int
) -> tuple[int | None, list[Problem]]:
    """Return the steps of a new run, and the problems of its schedule.

    The steps are None if the number of its samples does not determine them.
    """
    if training.max_tokens is not None:
        return None, []
    steps = plan_steps(training, samples=count.samples, tokens=1, global_batch=global_batch)
    try:
        check_steps(training.lr_scheduler_kwargs, warmup_steps=training.warmup_steps, steps=steps)
    except ValueError as error:
        pointer = "/training/warmup_steps" if training.warmup_steps else "/training/lr_scheduler_kwargs"
        return None, [Problem(pointer, str(error))]
    return steps if count.exact or training.max_steps is not None else None, []
