"""One optimizer step."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train_loop.batch import MicroBatch
from train_loop.loss import summed_loss
from train_loop.optim import clip_gradients
from train_loop.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """Cross entropy per trained token, before the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of the step."""
    applied: bool
    """False where loss or gradients were not finite and the weights stayed as they were."""


def train_step(
    state: TrainState, batches: Iterable[MicroBatch], trained_tokens: int, max_grad_norm: float | None
) -> StepResult:
    """Forward, backward, clip and apply. `trained_tokens` counts the whole step, all ranks and micro-batches."""
    loss = accumulate(state.model, batches, trained_tokens)
    norm = clip_gradients(state.model, max_grad_norm)
    # Both numbers are the same on every rank, so that all of them skip or none does.
    finite = bool(torch.isfinite(loss) & torch.isfinite(norm))
    lr = state.lr
    if finite:
        state.apply_gradients()
    state.drop_gradients()
    return StepResult(loss.item(), norm.item(), lr, finite)


def accumulate(model: nn.Module, batches: Iterable[MicroBatch], trained_tokens: int) -> Tensor:
    """Gradients of a whole step in the parameters, and its loss over all ranks.

    FSDP sums gradients over ranks, so that dividing each micro-batch's summed loss by the step's tokens is the only
    factor there is.
    """
    total = torch.zeros(())
    for batch in batches:
        logits = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
        ).logits
        # A step without any trained token is legal: its loss and gradients are zero.
        loss = summed_loss(logits, batch.labels) / max(trained_tokens, 1)
        torch.autograd.backward(loss)
        total = total.to(loss.device) + loss.detach()
    dist.all_reduce(total)
    return total
