"""The one loss rule: token cross entropies of a whole optimizer step, summed, over its number of valid tokens."""

from torch import Tensor
from torch.nn import functional as F

from train_loop.data.dataset import IGNORE


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross entropies in fp32 over the labels that count; logits [B, T, V], labels [B, T] already shifted."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
