"""Token cross entropy of ranks that each have the logits of a part of the vocabulary.

No rank sees all logits of a token: the ranks exchange its largest logit, the sum of its exponentials and the logit of
its label (Shoeybi et al., "Megatron-LM", 2019). Shapes: N tokens, V tokens of the vocabulary, P ranks.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train_loop.data.dataset import IGNORE
from train_loop.telemetry.timers import ComputeTimer


@dataclass(frozen=True)
class VocabularyPart:
    """The part of the vocabulary whose logits this rank computes."""

    group: dist.ProcessGroup
    size: int
    """Tokens of the whole vocabulary."""
    timer: ComputeTimer = field(default_factory=lambda: ComputeTimer(torch.device("cpu")))
    """Timer that stops while ranks wait for each other."""

    def losses(self, logits: Tensor, targets: Tensor, *, smoothing: float, z_loss: float) -> Tensor:
        """Return the loss of each token, 0 for those to ignore; logits [N, V/P] in fp32, targets [N]."""
        ranks, width = self.group.size(), logits.shape[-1]
        local = targets - dist.get_rank(self.group) * -(-self.size // ranks)
        is_own = (local >= 0) & (local < width)
        # The ranks have shards as torch.chunk cuts them: the last may have fewer tokens, or none.
        picked = logits.new_zeros(len(targets))
        if width:
            found = logits.gather(1, local.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
            picked = torch.where(is_own, found, 0.0)
        top = logits.detach().amax(-1) if width else picked.new_full((len(targets),), -torch.inf)
        with self.timer.waiting():
            dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        sums = [(logits - top.unsqueeze(1)).exp().sum(-1), picked, *([logits.sum(-1)] if smoothing else [])]
        with self.timer.waiting():
            exponentials, target, *total = sum_of_ranks(torch.stack(sums), self.group)
        normaliser = exponentials.log() + top
        loss: Tensor = normaliser - target
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (normaliser - total[0] / self.size)
        if z_loss:
            loss = loss + z_loss * normaliser.square()
        return loss.masked_fill(targets == IGNORE, 0.0)


class _SumOfRanks(torch.autograd.Function):
    """A sum over ranks that all use in the same way, so that its gradient is that of each rank's part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def sum_of_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum values over ranks; the gradient of the sum is that of each rank's values."""
    total: Tensor = _SumOfRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return total
