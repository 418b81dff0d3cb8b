"""Conversion of sample rows to the model's micro-batches. B: rows, T: sequence length, P: Ulysses ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from train_loop.data.dataset import IGNORE, Dataset, Rows
from train_loop.data.order import Ids
from train_loop.errors import DataError
from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepBatch:
    """Samples of one data rank in an optimizer step, as whole sequences."""

    samples: Tensor  # [n]
    lengths: Tensor  # [n] tokens that are not padding
    input_ids: Tensor  # [n, T]
    labels: Tensor  # [n, T] label t is the target of position t
    weights: Tensor | None  # [n, T] weight of label t, 0 if it is IGNORE; None if all weights are 1
    position_ids: Tensor  # [n, T]

    def part(self, rows: slice) -> "StepBatch":
        """Return some of the rows."""
        return replace(self, **{name: values[rows] for name, values in vars(self).items() if values is not None})


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one model call on this rank: its slice of the sequence."""

    input_ids: Tensor  # [B, T/P]
    labels: Tensor  # [B, T/P]
    weights: Tensor | None  # [B, T/P]
    position_ids: Tensor  # [B, T/P]
    attention: dict[str, Any]
    """Arguments of the model's call that its family has made from whole sequences."""
    last: bool
    """True for the last micro-batch of a step on this rank."""


def share_rows(rows: Rows | None, *, count: int, dataset: Dataset, mesh: Mesh) -> StepBatch:
    """Broadcast the rows that a Ulysses group's first rank read, and shift labels. A collective call over the group."""
    weighted = dataset.weighted
    packed = torch.empty(count, 2 + (3 + weighted) * dataset.sequence_length, dtype=torch.int64)
    if rows is not None:
        packed = _pack(rows, weighted=weighted)
    packed = packed.to(mesh.device)
    if mesh.plan.sp > 1:
        dist.broadcast(packed, group=mesh.sp, group_src=0)
    input_ids, labels, positions, *bits = torch.split(packed[:, 2:], dataset.sequence_length, dim=1)
    labels, weights = shift_labels(labels, positions), None
    if weighted:
        weights = shift_weights(bits[0].int().view(torch.float32), labels)
        labels = labels.masked_fill(weights == 0, IGNORE)
    return StepBatch(packed[:, 0], packed[:, 1], input_ids, labels, weights, positions)


def _pack(rows: Rows, *, weighted: bool) -> Tensor:
    """Return rows as one tensor for one broadcast; float32 weights become integers with the same bits."""
    parts: list[NDArray[Any]] = [rows.samples[:, None], rows.lengths[:, None]]
    parts += [rows.input_ids, rows.labels, rows.position_ids]
    if weighted:
        assert rows.weights is not None, "rows of a dataset with weights have weights"
        parts.append(rows.weights.view(np.int32))
    return torch.cat([torch.from_numpy(part.copy()).long() for part in parts], dim=1)


def shift_labels(labels: Tensor, position_ids: Tensor) -> Tensor:
    """Shift labels left by one on the full sequence; a document's last token gets IGNORE. Both are [n, T]."""
    shifted = torch.full_like(labels, IGNORE)
    shifted[:, :-1] = labels[:, 1:].masked_fill(position_ids[:, 1:] == 0, IGNORE)
    return shifted


def shift_weights(weights: Tensor, shifted_labels: Tensor) -> Tensor:
    """Shift weights like their labels; positions without a label get weight 0. Both are [n, T]."""
    return F.pad(weights[:, 1:], (0, 1)).masked_fill(shifted_labels == IGNORE, 0.0)


def micro_batches(batch: StepBatch, size: int, anatomy: Anatomy, mesh: Mesh) -> Iterator[MicroBatch]:
    """Cut a step's rows into micro-batches of `size` and keep this rank's slice of the sequence."""
    width = batch.input_ids.shape[1] // mesh.plan.sp
    mine = slice(mesh.sequence_rank * width, (mesh.sequence_rank + 1) * width)
    weights = _weights_that_matter(batch)
    for start in range(0, len(batch.samples), size):
        rows = slice(start, start + size)
        whole = {"position_ids": batch.position_ids[rows], "length": batch.lengths[rows]}
        yield MicroBatch(
            batch.input_ids[rows, mine],
            batch.labels[rows, mine],
            None if weights is None else weights[rows, mine],
            batch.position_ids[rows, mine],
            anatomy.family.arguments(anatomy.model, whole),
            last=start + size >= len(batch.samples),
        )


def _weights_that_matter(batch: StepBatch) -> Tensor | None:
    """Return None if all weights are 1: the loss is then summed as without weights, equal bit for bit."""
    if batch.weights is None or torch.equal(batch.weights, (batch.labels != IGNORE).float()):
        return None
    return batch.weights


def check_vocabulary(rows: Rows | None, vocabulary: int | None) -> None:
    """Raise DataError for a token outside the model's vocabulary. A GPU would only report a failed assertion."""
    if rows is None or vocabulary is None:
        return
    trained = np.where(rows.labels == IGNORE, 0, rows.labels)
    for name, ids in (("token", rows.input_ids), ("label", trained)):
        strange = np.argwhere((ids < 0) | (ids >= vocabulary))
        if len(strange):
            row, place = strange[0]
            raise DataError(
                f"sample {rows.samples[row]} has {name} {ids[row, place]} at position {place}, outside the "
                f"model's vocabulary of {vocabulary}; tokenise with the model's own tokenizer, or correct the model's "
                "vocab_size"
            )


def check_samples(batch: StepBatch, expected: Ids) -> None:
    """Raise RuntimeError unless the rows are the order's samples of this step: each sample is used exactly once."""
    if batch.samples.tolist() != expected.tolist():
        raise RuntimeError(
            f"the stream delivered samples {batch.samples.tolist()}; expected {expected.tolist()}; "
            "the run stops before it trains on wrong data"
        )
