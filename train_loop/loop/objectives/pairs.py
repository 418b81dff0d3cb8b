"""Objectives of sequences that stay together: of rewards (Bradley and Terry, 1952), and of embeddings (InfoNCE)."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from train_loop.data.columns import TARGETS
from train_loop.data.order import PADDING
from train_loop.loop.batch import MicroBatch, StepBatch
from train_loop.loop.objectives.objective import Terms, call_model
from train_loop.model.families.anatomy import Anatomy
from train_loop.spec import EmbeddingSpec

_COLUMNS = ("input_ids", "position_ids", "length")
_MOST = (1, 5)
"""Numbers of texts among which recall looks for the right one."""


class RewardLoss:
    """-log sigmoid(reward of chosen - reward of rejected - margin), summed over pairs.

    `center` is the factor of the squared sum of both rewards, as in TRL.
    """

    columns = _COLUMNS
    sums = ("accuracy", "reward_chosen", "reward_rejected", "reward_margin")
    evaluation_sums = ("loss", *sums, "pairs")

    def __init__(self, anatomy: Anatomy, *, center: float = 0.0) -> None:
        self.anatomy, self._center = anatomy, center

    def divisor(self, batch: StepBatch) -> Tensor:
        """Return the number of pairs."""
        return (batch.samples != PADDING).sum()

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the summed loss, and sums of the rewards. Raises ModelError for errors in the model's own code."""
        is_pair = batch.samples != PADDING
        # Rows 2 n and 2 n + 1 are the sequences of pair n.
        rewards = call_model(self.anatomy, batch).float().view(-1, 2).masked_fill(~is_pair[:, None], 0.0)
        chosen, rejected = rewards.unbind(1)
        difference = chosen - rejected
        losses = -F.logsigmoid(difference - batch.values.get(TARGETS.name, 0.0)).masked_fill(~is_pair, 0.0)
        if self._center:
            losses = losses + self._center * (chosen + rejected).square()
        values = (chosen > rejected, chosen, rejected, difference)
        return Terms(losses.sum(), sums=dict(zip(self.sums, (one.sum() for one in values), strict=True)))

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the summed loss, the sums of the rewards, and the number of pairs."""
        terms = self(batch)
        return terms.total, *terms.sums.values(), (batch.samples != PADDING).sum()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return the mean loss, the fraction of pairs whose chosen one has the higher reward, and mean rewards."""
        return _means(sums, ("loss", *self.sums), count="pairs")


class ContrastiveLoss:
    """Cross entropy of each anchor's own positive among all texts of its group, summed over anchors.

    A group is some consecutive samples of the order of the run. Its positives and negatives are the texts. A group lies
    in one micro-batch, so that neither ranks nor accumulation change the loss.
    """

    columns = _COLUMNS
    sums = tuple(f"recall_at_{most}" for most in _MOST)
    evaluation_sums = ("loss", *sums, "anchors")

    def __init__(self, anatomy: Anatomy, rule: EmbeddingSpec) -> None:
        self.anatomy, self._rule = anatomy, rule

    def divisor(self, batch: StepBatch) -> Tensor:
        """Return the number of anchors."""
        return (batch.samples != PADDING).sum()

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the summed loss, and the numbers of anchors whose positive is among the nearest texts.

        Raises ModelError for errors in the model's own code.
        """
        is_sample = (batch.samples != PADDING).view(-1, self._rule.group)  # [G, S]
        found = call_model(self.anatomy, batch).float()  # [G x S x (1 + N), H]
        vectors = found.view(*is_sample.shape, -1, found.shape[-1])
        anchors, texts = vectors[:, :, 0], vectors[:, :, 1:].flatten(1, 2)
        scores = anchors @ texts.transpose(1, 2) / self._rule.temperature  # [G, S, S x N]
        each = texts.shape[1] // self._rule.group
        # Not infinity: the gradient of a group of padding would not be a number.
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~is_sample.repeat_interleave(each, 1)[:, None], least)
        own = torch.arange(0, texts.shape[1], each, device=scores.device).expand_as(is_sample)  # [G, S]
        losses = F.cross_entropy(scores.flatten(0, 1), own.flatten(), reduction="none").view_as(is_sample)
        # Texts that are as near count as nearer: equal embeddings find nothing.
        nearer = (scores >= scores.gather(2, own[..., None])).sum(2) - 1
        hits = [((nearer < most) & is_sample).sum() for most in _MOST]
        return Terms(losses.masked_fill(~is_sample, 0.0).sum(), sums=dict(zip(self.sums, hits, strict=True)))

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the summed loss, the numbers of anchors whose positive is found, and that of all anchors."""
        terms = self(batch)
        return terms.total, *terms.sums.values(), (batch.samples != PADDING).sum()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return the mean loss, the recall among texts of a group, and the number of anchors."""
        return _means(sums, ("loss", *self.sums), count="anchors")


def _means(sums: Mapping[str, Tensor], names: tuple[str, ...], *, count: str) -> dict[str, float | int]:
    means = torch.stack([sums[name] for name in names]) / sums[count]
    return dict(zip(names, means.tolist(), strict=True)) | {count: int(sums[count])}
