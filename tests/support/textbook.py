"""Losses and metrics of heads by their textbook formulas, for the outputs of transformers' own models.

Each function returns the loss of each labelled item, and the metrics of all of them with the names of evaluations.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Result(NamedTuple):
    """The loss of each labelled item, and metrics of all of them."""

    losses: Tensor
    metrics: dict[str, float]


def classes(logits: Tensor, labels: Tensor) -> Result:
    """Return cross entropy, accuracy and macro F1 of logits [N, C] for labels [N]."""
    losses, found = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1)
    f1 = [
        2 * int(((labels == one) & (found == one)).sum()) / int((labels == one).sum() + (found == one).sum())
        for one in sorted({*labels.tolist(), *found.tolist()})
    ]
    accuracy = (labels == found).double().mean().item()
    return _result(losses, accuracy=accuracy, f1=sum(f1) / len(f1), labels=len(labels))


def numbers(found: Tensor, labels: Tensor) -> Result:
    """Return squared errors."""
    losses = (found - labels).square()
    return _result(losses, mse=losses.mean().item(), labels=len(labels))


def rewards(chosen: Tensor, rejected: Tensor, *, margins: Tensor | float = 0.0, center: float = 0.0) -> Result:
    """Return the loss of TRL's RewardTrainer for pairs, and the values that it logs."""
    difference = chosen - rejected
    losses = -F.logsigmoid(difference - margins) + center * (chosen + rejected).square()
    values = {"accuracy": (difference > 0).float(), "reward_margin": difference}
    values |= {"reward_chosen": chosen, "reward_rejected": rejected}
    return _result(losses, pairs=len(chosen), **{name: one.mean().item() for name, one in values.items()})


def recalls(anchors: Tensor, texts: list[Tensor], *, group: int, temperature: float) -> Result:
    """Return the loss of sentence-transformers' MultipleNegativesRankingLoss in batches of a group, and recalls.

    Anchors are [N, H]. The texts are positives, and negatives of one column or several, each [N, H].
    """
    losses, ranks = list[Tensor](), list[Tensor]()
    for start in range(0, len(anchors), group):
        part = slice(start, start + group)
        scores = anchors[part] @ torch.cat([one[part] for one in texts]).T / temperature
        own = torch.arange(len(scores))
        losses.append(F.cross_entropy(scores, own, reduction="none"))
        ranks.append((scores > scores[own, own][:, None]).sum(1))
    rank = torch.cat(ranks)
    found = {f"recall_at_{most}": (rank < most).float().mean().item() for most in (1, 5)}
    return _result(torch.cat(losses), anchors=len(anchors), **found)


def embeddings(states: Tensor, mask: Tensor, pooling: str, *, normalize: bool = True) -> Tensor:
    """Return the embeddings [N, H] of texts from the states [N, T, H] of their tokens."""
    if pooling == "mean":
        found = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    else:
        places = torch.zeros(len(mask)).long() if pooling == "cls" else mask.sum(1) - 1
        found = states[torch.arange(len(mask)), places]
    return F.normalize(found, dim=-1) if normalize else found


def _result(losses: Tensor, **metrics: float) -> Result:
    return Result(losses, {"loss": losses.mean().item()} | metrics)
