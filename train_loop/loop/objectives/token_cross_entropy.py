"""Token cross entropy: the sum over a step's labels, which the loop divides by their number.

If the data has token weights, the loss is the weighted mean.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from train_loop.data.dataset import IGNORE
from train_loop.loop.batch import MicroBatch, StepBatch
from train_loop.loop.objectives.objective import Terms, call_model
from train_loop.loop.objectives.vocabulary import VocabularyPart
from train_loop.model.families.after_head import Step, take_steps
from train_loop.model.families.anatomy import Anatomy


@dataclass(frozen=True)
class LossRule:
    """Loss terms that are summed over tokens; by default only cross entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    """Weight of log(Z)^2, which keeps the softmax's denominator Z near 1 (PaLM, Chowdhery et al., 2022)."""
    in_order: bool = False
    """Whether tokens are summed in one order, with and without weights, as `any_size` runs need."""
    after_head: tuple[Step, ...] = ()
    """Steps from the given logits to those of the model, if they are the output of its head."""
    vocabulary: VocabularyPart | None = None
    """The part of the vocabulary of which the logits are; None for all of it."""
    output_dtype: torch.dtype | None = None
    """Dtype of the model's output, to which the head's output is rounded; None for that of the head."""

    def sum(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the loss in fp32 over labels that are not IGNORE; logits [..., V], shifted labels and weights [...]."""
        rows, targets = self._output(logits).float().flatten(0, -2), labels.flatten()
        plain = weights is None and not self.in_order
        if self.vocabulary is not None:
            found = self.vocabulary.losses(rows, targets, smoothing=self.label_smoothing, z_loss=self.z_loss)
            return (found if weights is None else found * weights.flatten()).sum()
        reduction = "sum" if plain else "none"
        loss = F.cross_entropy(
            rows, targets, ignore_index=IGNORE, reduction=reduction, label_smoothing=self.label_smoothing
        )
        if self.z_loss:
            squares = rows.logsumexp(-1).masked_fill(targets == IGNORE, 0.0).square()
            loss = loss + self.z_loss * (squares.sum() if plain else squares)
        if plain:
            return loss
        weighted = loss if weights is None else loss * weights.flatten()
        return sum_in_halves(weighted) if self.in_order else weighted.sum()

    def _output(self, logits: Tensor) -> Tensor:
        """Return the model's output, of which FSDP2's root unit has the dtype."""
        return take_steps(self.after_head, logits).to(self.output_dtype or logits.dtype)


@dataclass(frozen=True)
class CountingRule(LossRule):
    """A loss rule that also counts the labels with the largest logit."""

    hits: list[Tensor] = field(default_factory=list)

    def sum(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the loss, and keep the number of labels with the largest logit."""
        self.hits.append((self._output(logits).argmax(-1) == labels).sum())
        return super().sum(logits, labels, weights)


def sum_in_halves(values: Tensor) -> Tensor:
    """Sum values [N] by adding their second half to the first until one is left.

    The order depends only on N: not on threads, alignment, or whether the values were weighted. Weights of 1 therefore
    give the bits of a sum without weights.
    """
    while len(values) > 1:
        # A row of two is one addition.
        values = F.pad(values, (0, len(values) % 2)).view(2, -1).sum(0)
    return values.sum()


def total_weight(labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the number of labels, or with weights their sum in float64."""
    if weights is None:
        return (labels != IGNORE).sum()
    # The order of summation depends on the mesh; the result must not.
    return weights.sum(dtype=torch.float64)


class TokenLoss:
    """The objective of token cross entropy, from whole logits or, inside the model's head, from chunks of them.

    With chunks the head returns the loss instead of logits, while FSDP still has its weight gathered.
    """

    columns = ("input_ids", "labels", "position_ids")
    sums = ()
    evaluation_sums = ("loss", "weight", "tokens")

    def __init__(
        self,
        anatomy: Anatomy,
        rule: LossRule | None = None,
        *,
        chunk_rows: int | None = None,
        after_head: tuple[Step, ...] = (),
    ) -> None:
        self.anatomy = anatomy
        self._rule = rule or LossRule()
        # Cross entropy only, without the extra terms of training.
        self._evaluation_rule = replace(self._rule, label_smoothing=0.0, z_loss=0.0)
        self._chunk_rows = chunk_rows
        self._after_head = after_head
        self._due: tuple[LossRule, MicroBatch] | None = None
        self._found: Tensor | None = None
        """Loss that the head found, if the model's output is not the head's."""
        self._is_changed = bool(after_head) or self._rule.output_dtype in (torch.bfloat16, torch.float16)
        if chunk_rows is not None:
            assert isinstance(anatomy.head, nn.Linear), "only linear heads have chunks"
            self._head = anatomy.head
            self._head.forward = self._chunked_head  # type: ignore[assignment, method-assign]

    @property
    def chunk_rows(self) -> int | None:
        """Return the tokens of a chunk of logits; None if they are computed at once."""
        return self._chunk_rows

    def divisor(self, batch: StepBatch) -> Tensor:
        """Return the number of labels, or with weights their sum."""
        return total_weight(batch.labels, batch.weights)

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the summed loss of this rank's slice. Raises ModelError for errors in the model's own code."""
        return Terms(self._sum(batch, self._rule))

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of cross entropies, that of weights, and the number of labels."""
        loss = self._sum(batch, self._evaluation_rule)
        return loss, total_weight(batch.labels, batch.weights), (batch.labels != IGNORE).sum()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return mean cross entropy and perplexity per token, and the number of labels; NaN if there are none."""
        mean = sums["loss"] / sums["weight"]
        return {"loss": mean.item(), "perplexity": mean.exp().item(), "tokens": int(sums["tokens"])}

    def _sum(self, batch: MicroBatch, rule: LossRule) -> Tensor:
        """Call the model and return the summed loss of this rank's slice by a rule."""
        self._due = (rule, batch)
        out = call_model(self.anatomy, batch)
        if self._chunk_rows is None:
            return rule.sum(out, batch.labels, batch.weights)
        # FSDP2 needs the model's output in the graph, where it adds nothing.
        return out.sum() if self._found is None else self._found + 0 * out.sum()

    def _chunked_head(self, hidden: Tensor) -> Tensor:
        """Return the loss for hidden states [B, T, H] without allocating logits [B * T, V]."""
        assert self._due is not None
        assert self._chunk_rows is not None
        plain_rule, batch = self._due
        rule = replace(plain_rule, after_head=self._after_head)
        head, labels = self._head, batch.labels.flatten()
        label_weights = None if batch.weights is None else batch.weights.flatten()
        weight, bias = map(_plain, (head.weight, head.bias))
        loss = chunked_sum(rule, hidden.flatten(0, 1), weight, bias, labels, self._chunk_rows, label_weights)
        self._found = loss if self._is_changed else None
        # A model may read the sizes of its logits. FSDP2 warns of views. A changed loss could overflow, but not zero.
        return (0 * loss if self._is_changed else loss).view(1, 1, 1).clone()


class MaskedLoss(TokenLoss):
    """The objective of masked language models: cross entropy of the masked tokens, which are the only labels."""

    evaluation_sums = ("loss", "hits", "tokens")

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of cross entropies, and the numbers of tokens that are predicted right, and masked."""
        rule = CountingRule(output_dtype=self._rule.output_dtype)
        loss = self._sum(batch, rule)
        return loss, torch.stack(rule.hits).sum(), (batch.labels != IGNORE).sum()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return mean cross entropy, its perplexity and the accuracy on masked tokens; NaN if there are none."""
        loss, accuracy = sums["loss"] / sums["tokens"], sums["hits"] / sums["tokens"]
        means = {"loss": loss, "perplexity": loss.exp(), "accuracy": accuracy}
        return {name: mean.item() for name, mean in means.items()} | {"tokens": int(sums["tokens"])}


def chunked_sum(
    rule: LossRule,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    rows: int,
    label_weights: Tensor | None = None,
) -> Tensor:
    """Compute `rule.sum` from hidden [N, H], weight [V, H], bias [V] and labels [N], `rows` at a time.

    `label_weights` [N] are the weights of labels; None means 1.
    """
    if torch.is_grad_enabled():
        loss: Tensor = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
            rule, hidden, weight, bias, labels, rows, label_weights
        )
        return loss
    parts = (
        rule.sum(F.linear(hidden[part], weight, bias), labels[part], _part(label_weights, part))
        for part in _chunks(len(hidden), rows)
    )
    return torch.stack(list(parts)).sum()


class _ChunkedSum(torch.autograd.Function):
    """Autograd function that computes gradients in forward, chunk by chunk; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        rule: LossRule,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rows: int,
        label_weights: Tensor | None,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden)
        # In fp32: a bf16 sum over many chunks would lose later contributions.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias.requires_grad else None
        for part in _chunks(len(hidden), rows):
            loss, d_logits = _loss_and_gradient(
                rule, F.linear(hidden[part], weight, bias), labels[part], _part(label_weights, part)
            )
            total += loss
            torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight += d_logits.T @ hidden[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=torch.float32)
        if rule.vocabulary is not None:
            # Every rank has used the hidden states for its part of the vocabulary.
            with rule.vocabulary.timer.waiting():
                dist.all_reduce(d_hidden, group=rule.vocabulary.group)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weighed = [d if d is None else d.mul_(grad).to(ctx.dtype) for d in (d_weight, d_bias)]
        return None, d_hidden.mul_(grad), *weighed, None, None, None


def _loss_and_gradient(
    rule: LossRule, logits: Tensor, labels: Tensor, label_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = rule.sum(leaf, labels, label_weights)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def _plain(parameter: Tensor | None) -> Any:
    """Return this rank's part of a head's parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(label_weights: Tensor | None, part: slice) -> Tensor | None:
    return None if label_weights is None else label_weights[part]


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, count, rows))
