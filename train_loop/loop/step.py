"""Optimizer step: forward, backward, clipping and update."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule

from train_loop.loop.batch import MicroBatch
from train_loop.loop.loss import TokenLoss
from train_loop.model.families.anatomy import Anatomy
from train_loop.optim import clip_gradients
from train_loop.parallel.ordered import OrderedReduction
from train_loop.state import TrainState, seed_generators


@dataclass(frozen=True)
class StepResult:
    """Results of an optimizer step, identical on all ranks."""

    loss: float
    """Loss per label, or per unit of weight, before the update."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    """Learning rate of the step."""
    applied: bool
    """False if loss or gradients were not finite and the weights remained unchanged."""
    overflow: bool
    """True if the update was skipped because the fp16 gradient scaler's factor was too large; the scaler lowers it."""


def train_step(
    state: TrainState,
    loss: TokenLoss,
    batches: Iterable[MicroBatch],
    divisor: float,
    max_grad_norm: float | None,
    ordered: OrderedReduction | None = None,
) -> StepResult:
    """Run forward, backward, clipping and update. `divisor` is the loss divisor over all ranks and micro-batches.

    `ordered` sums in the order of a reduction tree.
    """
    scaler = state.scaler
    if ordered is None:
        mean = accumulate(loss, batches, divisor, scaler)
        norm = None
    else:
        mean = accumulate_in_order(loss, batches, divisor, ordered, step=state.step)
        norm = ordered.grad_norm(state.model)
    for optimizer in state.optimizers:
        scaler.unscale_(optimizer)
    norm = clip_gradients(state.model, max_grad_norm, norm)
    # Both numbers are identical on all ranks: either all skip or none does.
    finite = bool(torch.isfinite(mean) & torch.isfinite(norm))
    # The loss is unscaled: the scaler cannot cause a non-finite loss.
    overflow = bool(torch.isfinite(mean)) and not finite and scaler.get_scale() > 1
    lr = state.lr
    if finite:
        state.apply_gradients()
    scaler.update()
    state.drop_gradients()
    return StepResult(mean.item(), norm.item(), lr, finite, overflow)


def accumulate(loss: TokenLoss, batches: Iterable[MicroBatch], divisor: float, scaler: GradScaler) -> Tensor:
    """Accumulate a step's gradients, times the scaler's factor, and return its loss over all ranks.

    FSDP sums gradients over ranks. Each micro-batch's summed loss is divided only by the step's divisor.
    """
    root = _prefetch(loss.anatomy)
    losses: list[Tensor] = []
    for batch in batches:
        # Each micro-batch reduces its gradients to shards, because whole ones would not fit; replicas of a shard
        # all-reduce once per step.
        root.set_requires_all_reduce(batch.last)
        # A step without labels is valid: its loss and gradients are zero.
        mean = loss(batch) / (divisor or 1)
        torch.autograd.backward(scaler.scale(mean))
        losses.append(mean.detach())
    # Added in order and in float32, whatever the model's output_dtype is.
    total = sum(losses, start=torch.zeros((), device=losses[0].device))
    dist.all_reduce(total)
    return total


def accumulate_in_order(
    loss: TokenLoss,
    batches: Iterable[MicroBatch],
    divisor: float,
    ordered: OrderedReduction,
    *,
    step: int,
) -> Tensor:
    """Accumulate a step's gradients as `accumulate` does, in the order of a reduction tree, and return its loss."""
    _prefetch(loss.anatomy)
    ordered.begin_step()
    losses: list[Tensor] = []
    for number, batch in enumerate(batches):
        # Dropout depends on the place of the micro-batch, and not on the rank that computes it.
        seed_generators(ordered.seed, step=step, rank=ordered.slice_of(number))
        mean = loss(batch) / (divisor or 1)
        torch.autograd.backward(mean)
        losses.append(mean.detach())
        if not batch.last:
            # The unit keeps its partial sum; FSDP2 would add to the gradient in another order.
            for parameter in loss.model.parameters():
                parameter.grad = None
    return ordered.sum(torch.stack(losses))


def _prefetch(anatomy: Anatomy) -> FSDPModule:
    """Gather the parameters that forward needs first, while masks are built. Return the model as an FSDP unit."""
    for module in filter(None, (anatomy.model, anatomy.embeddings)):
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)
    root = anatomy.model
    assert isinstance(root, FSDPModule), "parallelize makes every model an FSDP unit"
    return root
