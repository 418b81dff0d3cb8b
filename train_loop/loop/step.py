"""One optimizer step."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule

from train_loop.loop.batch import MicroBatch
from train_loop.loop.loss import TokenLoss
from train_loop.loop.state import TrainState
from train_loop.optim import clip_gradients


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """Loss per trained token, or per unit of their weight, before the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of the step."""
    applied: bool
    """False where loss or gradients were not finite and the weights stayed as they were."""
    overflow: bool
    """Not applied because the fp16 gradient scaler's factor was too large, which it now lowers."""


def train_step(
    state: TrainState, loss: TokenLoss, batches: Iterable[MicroBatch], divisor: float, max_grad_norm: float | None
) -> StepResult:
    """Forward, backward, clip and apply. `divisor` is the loss's of the whole step, all ranks and micro-batches."""
    scaler = state.scaler
    mean = accumulate(loss, batches, divisor, scaler)
    for optimizer in state.optimizers:
        scaler.unscale_(optimizer)
    norm = clip_gradients(state.model, max_grad_norm)
    # Both numbers are the same on every rank, so that all of them skip or none does.
    finite = bool(torch.isfinite(mean) & torch.isfinite(norm))
    # The loss knows nothing of the scaler's factor: what is not finite in it is the run's own.
    overflow = bool(torch.isfinite(mean)) and not finite and scaler.get_scale() > 1
    lr = state.lr
    if finite:
        state.apply_gradients()
    scaler.update()
    state.drop_gradients()
    return StepResult(mean.item(), norm.item(), lr, finite, overflow)


def accumulate(loss: TokenLoss, batches: Iterable[MicroBatch], divisor: float, scaler: GradScaler) -> Tensor:
    """Gradients of a whole step in the parameters, times the scaler's factor, and its loss over all ranks.

    FSDP sums gradients over ranks, so that dividing each micro-batch's summed loss by the step's divisor is the only
    factor there is.
    """
    root: FSDPModule = loss.model
    # What the forward pass needs first travels while masks are made.
    for module in (loss.model, loss.model.get_input_embeddings()):
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)
    total = torch.zeros(())
    for batch in batches:
        # Gradients of every micro-batch are reduced to shards, because whole ones would not fit; replicas of a shard
        # hear of each other once.
        root.set_requires_all_reduce(batch.last)
        # A step without any trained token is legal: its loss and gradients are zero.
        mean = loss(batch) / (divisor or 1)
        torch.autograd.backward(scaler.scale(mean))
        total = total.to(mean.device) + mean.detach()
    dist.all_reduce(total)
    return total
