"""Optimizer step: forward, backward, clipping and update.

The loss of a step is the sum of its terms over all micro-batches and ranks, divided by its count. No other factor
applies, whatever the objective.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from train_loop.errors import UserError
from train_loop.loop.batch import MicroBatch
from train_loop.loop.objectives.objective import Objective, Terms
from train_loop.loop.reduction import Reduction
from train_loop.optim import clip_gradients
from train_loop.parallel.shard import begin_gather
from train_loop.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Results of an optimizer step, identical on all ranks."""

    loss: float
    """Loss per count: per label, or per unit of weight; before the update."""
    grad_norm: float
    """Gradient norm before clipping."""
    rates: tuple[float, ...]
    """Learning rate of each parameter group in the step."""
    applied: bool
    """False if loss or gradients were not finite and the weights remained unchanged."""
    overflow: bool
    """True if the update was skipped because the fp16 gradient scaler's factor was too large; the scaler lowers it."""
    means: dict[str, float]
    """The objective's named sums, divided by the step's count."""


class StepSums(NamedTuple):
    """Sums of a step over all micro-batches and ranks, divided by the step's count."""

    loss: Tensor
    means: dict[str, float]
    late_divisor: float
    """Number by which the gradients were divided after the last backward pass; 1 if they were divided before."""


def train_step(
    state: TrainState,
    objective: Objective,
    batches: Iterable[MicroBatch],
    *,
    divisor: float | None,
    reduction: Reduction,
    max_grad_norm: float | None,
) -> StepResult:
    """Run forward, backward, clipping and update. `divisor` is the step's count, if it is known before."""
    scaler = state.scaler
    reduction.begin_step(state.step)
    sums = accumulate(objective, batches, divisor, reduction=reduction, scaler=scaler)
    for optimizer in state.optimizers:
        scaler.unscale_(optimizer)
    norm = reduction.grad_norm()
    clip_gradients(state.optimizers, max_grad_norm, norm)
    # Both numbers are identical on all ranks: either all skip or none does.
    finite = bool(torch.isfinite(sums.loss) & torch.isfinite(norm))
    # The loss is unscaled: the scaler cannot cause a non-finite loss. Its factor was that of undivided gradients.
    overflow = bool(torch.isfinite(sums.loss)) and not finite and scaler.get_scale() * sums.late_divisor > 1
    rates = state.group_rates
    if finite:
        state.apply_gradients()
    if state.balance is not None:
        state.balance.end_step(applied=finite)
    scaler.update()
    state.drop_gradients()
    return StepResult(sums.loss.item(), norm.item(), rates, finite, overflow, sums.means)


def accumulate(
    objective: Objective,
    batches: Iterable[MicroBatch],
    divisor: float | None,
    *,
    reduction: Reduction,
    scaler: GradScaler,
) -> StepSums:
    """Accumulate a step's gradients, times the scaler's factor, and return its sums.

    Each micro-batch's sum is divided by the step's count before its backward pass. If only the terms contain the count,
    the gradients of undivided sums are divided once, after the last backward pass.
    """
    # The parameters that forward needs first are gathered while the masks of each micro-batch are built.
    begin_gather(objective.anatomy)
    losses, rows = list[Tensor](), list[Tensor]()
    for number, batch in enumerate(batches):
        reduction.begin_micro_batch(number)
        terms = objective(batch)
        # A step without labels is valid: its loss and gradients are zero.
        loss = terms.total if divisor is None else terms.total / (divisor or 1)
        reduction.backward(scaler.scale(loss), last=batch.last, stands_in=terms.stands_in)
        if not batch.last:
            begin_gather(objective.anatomy)
        losses.append(loss.detach())
        rows.append(_named_sums(terms, objective, counts=divisor is None))
    total = reduction.sum(torch.stack(losses))
    sums = [reduction.sum(column).item() for column in torch.stack(rows).unbind(1)]
    if divisor is not None:
        return StepSums(total, _means(objective, sums, divisor or 1), 1)
    count = _counted(sums.pop(), total)
    _divide_gradients(objective.anatomy.model, count)
    return StepSums(total / count, _means(objective, sums, count), count)


def _counted(count: float, total: Tensor) -> float:
    """Return the count by which a step's sums are divided: 1 if nothing counts. Raises UserError."""
    if count < 0 or (not count and total.item()):
        raise UserError(
            f"the loss of a step is {total.item():g} and its count {count:g}, by which it cannot be divided; return a "
            "count above 0 with each sum that is not 0"
        )
    return count or 1


def _named_sums(terms: Terms, objective: Objective, *, counts: bool) -> Tensor:
    """Return the named sums of a micro-batch, and its count if the terms contain it, in float64. Raises UserError."""
    found, name = tuple(terms.sums), type(objective).__name__
    if found != objective.sums:
        raise UserError(f"{name} returned the sums {found}; expected {objective.sums}, as its `sums` states")
    if counts == (terms.count is None):
        raise UserError(
            f"{name} must count in exactly one place: return a count with every loss, or a divisor for every batch"
        )
    values = [*terms.sums.values(), *([] if terms.count is None else [terms.count])]
    device = terms.total.device
    return torch.stack([v.detach().to(device, torch.float64) for v in values]) if values else torch.empty(0)


def _means(objective: Objective, sums: Iterable[float], count: float) -> dict[str, float]:
    return {name: value / count for name, value in zip(objective.sums, sums, strict=True)}


def _divide_gradients(model: nn.Module, count: float) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_div_([one.to_local() if isinstance(one, DTensor) else one for one in gradients], count)
