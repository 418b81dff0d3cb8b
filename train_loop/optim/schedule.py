"""Learning rate schedules of transformers, which stay constant after their last step."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from train_loop.errors import UserError
from train_loop.optim.plateau import Plateau
from train_loop.spec import SCHEDULE_FREE, TrainingSpec
from train_loop.spec.schedule import PLATEAU, check_steps

Scheduler = LambdaLR | Plateau
_NAMES = {"wsd": "warmup_stable_decay"}


def build_scheduler(optimizer: Optimizer, training: TrainingSpec, *, steps: int) -> Scheduler:
    """Build the spec's schedule over `steps` optimizer steps. Raises UserError if they are too few for it."""
    warmup = training.warmup_of(steps)
    try:
        check_steps(training.lr_scheduler_kwargs, warmup_steps=warmup, steps=steps)
    except ValueError as error:
        raise UserError(str(error)) from error
    if training.optimizer == SCHEDULE_FREE:
        return LambdaLR(optimizer, functools.partial(_warm, warmup))
    options = _options(training, steps, warmup)
    if training.lr_scheduler_type == PLATEAU:
        # The lowest rate is that of training.learning_rate; other groups have their part of it.
        least, base = options.pop("min_lr", 0.0), optimizer.defaults["lr"]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return Plateau(optimizer, min_lr=[least * (rate / base) for rate in rates], **options)
    scheduler: LambdaLR = get_scheduler(
        _NAMES.get(training.lr_scheduler_type, training.lr_scheduler_type),
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=options,
    )
    # The formulas do not hold after the last planned step: rates would rise again or fall below zero.
    last = steps - 1 if training.lr_scheduler_type == "cosine_warmup_with_min_lr" else steps
    scheduler.lr_lambdas = [functools.partial(_clamped, inner, last) for inner in scheduler.lr_lambdas]
    return scheduler


def go_to(scheduler: Scheduler, step: int) -> None:
    """Move the schedule and its learning rates to a step, whichever schedule was active before.

    A schedule that reacts to evaluations begins with its learning rate.
    """
    if isinstance(scheduler, Plateau):
        scheduler.last_epoch = step
        return
    rates = [base * rule(step) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        # torchao's optimizers keep the rate in a tensor that their compiled step references.
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
    scheduler.last_epoch, scheduler._step_count, scheduler._last_lr = step, step + 1, rates


def _options(training: TrainingSpec, steps: int, warmup: int) -> dict[str, Any]:
    """Return the spec's schedule options, with defaults if transformers has none."""
    given = training.lr_scheduler_kwargs.model_dump(exclude_none=True)
    if training.lr_scheduler_type in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and "min_lr" not in given:
        return {"min_lr_rate": 0.1} | given
    if training.lr_scheduler_type == "wsd":
        return {"num_decay_steps": min(-(-steps // 10), steps - warmup)} | given
    return given


def _warm(warmup: int, step: int) -> float:
    """Return the warm-up of schedule-free optimizers, whose first step has a rate above 0."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _clamped(inner: Callable[[int], float], last: int, step: int) -> float:
    return inner(min(step, last))
