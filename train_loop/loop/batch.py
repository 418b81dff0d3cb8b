"""Conversion of samples to the model's micro-batches. B: rows, T: sequence length, P: Ulysses ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from train_loop.data.columns import LABELS, LENGTH, SAMPLE, WEIGHTS, ByColumn, Column
from train_loop.data.dataset import IGNORE, Dataset, Rows
from train_loop.data.order import Ids
from train_loop.errors import DataError
from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.mesh import Mesh

_WORD = np.dtype(np.int64).itemsize


@dataclass(frozen=True)
class StepBatch(ByColumn[Tensor]):
    """Samples of one data rank in an optimizer step, as whole sequences.

    Label t is the target of position t; its weight is 0 if it is IGNORE.
    """

    columns: tuple[Column, ...]

    @property
    def tokens(self) -> Tensor:
        """Number of tokens that are not padding; 0 without a column of tokens."""
        return self.lengths.sum() if LENGTH in self.columns else self.samples.new_zeros(())

    def part(self, rows: slice) -> "StepBatch":
        """Return some of the rows."""
        return StepBatch({name: values[rows] for name, values in self.values.items()}, self.columns)


@dataclass(frozen=True)
class MicroBatch(ByColumn[Tensor]):
    """Inputs of one model call on this rank: its slice of the sequence, and all values of columns without tokens."""

    attention: dict[str, Any]
    """Arguments of the model's call that its family has made from whole sequences."""
    last: bool
    """True for the last micro-batch of a step on this rank."""


def share_rows(rows: Rows | None, *, count: int, dataset: Dataset, mesh: Mesh) -> StepBatch:
    """Broadcast the rows that the first of its peers read, and shift labels. A collective call over `mesh.peers`."""
    columns, length = dataset.columns, dataset.sequence_length
    dense = [column for column in columns if column.kind != "ragged"]
    words = [-(-count * column.bytes_in(length) // _WORD) for column in dense]
    message = torch.empty(sum(words), dtype=torch.int64)
    if rows is not None:
        _pack(rows, dense, words, message.numpy())
    message = message.to(mesh.device)
    if mesh.plan.peers > 1:
        dist.broadcast(message, group=mesh.peers, group_src=0)
    values: dict[str, Any] = {
        column.name: _unpack(part, column, (count, *column.shape_in(length)))
        for column, part in zip(dense, torch.split(message, words), strict=True)
    }
    values |= _share_ragged(rows, [column for column in columns if column.kind == "ragged"], mesh)
    if LABELS in columns and not dataset.aligned:
        values |= _shift(ByColumn[Tensor](values))
    return StepBatch(values, columns)


def _pack(rows: Rows, columns: list[Column], words: list[int], message: NDArray[np.int64]) -> None:
    """Copy the bytes of each column to its words of the message, so that one broadcast has them all."""
    start = 0
    for column, size in zip(columns, words, strict=True):
        values = np.ascontiguousarray(rows.values[column.name], column.dtype).reshape(-1)
        assert -(-values.nbytes // _WORD) == size, f"the rows have {values.nbytes} bytes in column {column.name}"
        message[start : start + size].view(column.dtype)[: len(values)] = values
        start += size


def _unpack(part: Tensor, column: Column, shape: tuple[int, ...]) -> Tensor:
    """Return a column's values from its part of the message; tokens as int64, by which torch looks up embeddings."""
    values = part.view(_torch_type(column.dtype))
    if len(values) != (size := math.prod(shape)):
        values = values[:size]
    values = values.view(shape)
    return values.long() if column.kind == "token" and not values.is_floating_point() else values


@lru_cache
def _torch_type(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _share_ragged(rows: Rows | None, columns: list[Column], mesh: Mesh) -> dict[str, list[Any]]:
    """Broadcast ragged columns, whose sizes only the first rank knows."""
    shared = [None if rows is None else {column.name: rows.values[column.name] for column in columns}]
    if columns and mesh.plan.peers > 1:
        dist.broadcast_object_list(shared, group=mesh.peers, group_src=0, device=mesh.device)
    values = shared[0] or {}
    return {name: [_on_device(one, mesh.device) for one in several] for name, several in values.items()}


def _on_device(value: Any, device: torch.device) -> Any:
    # Values from Arrow are read-only, and byte strings are no tensors.
    return torch.tensor(value, device=device) if isinstance(value, np.ndarray) else value


def _shift(read: ByColumn[Tensor]) -> dict[str, Tensor]:
    """Return labels, and weights if there are any, at the positions that predict them."""
    labels = shift_labels(read.labels, read.position_ids)
    if read.weights is None:
        return {LABELS.name: labels}
    weights = shift_weights(read.weights, labels)
    return {LABELS.name: labels.masked_fill(weights == 0, IGNORE), WEIGHTS.name: weights}


def shift_labels(labels: Tensor, position_ids: Tensor) -> Tensor:
    """Shift labels left by one on the full sequence; a document's last token gets IGNORE. Both are [n, T]."""
    shifted = torch.full_like(labels, IGNORE)
    shifted[:, :-1] = labels[:, 1:].masked_fill(position_ids[:, 1:] == 0, IGNORE)
    return shifted


def shift_weights(weights: Tensor, shifted_labels: Tensor) -> Tensor:
    """Shift weights like their labels; positions without a label get weight 0. Both are [n, T]."""
    return F.pad(weights[:, 1:], (0, 1)).masked_fill(shifted_labels == IGNORE, 0.0)


def trim(batch: StepBatch, *, multiple: int = 1) -> StepBatch:
    """Return the rows without the padding that all of them have, at a length that is a multiple of `multiple`."""
    longest = max(int(batch.lengths.max()), 1)
    width = -(-longest // multiple) * multiple
    kept = {column.name: column.kind == "token" for column in batch.columns}
    values = {name: value[:, :width] if kept[name] else value for name, value in batch.values.items()}
    return StepBatch(values, batch.columns)


def micro_batches(batch: StepBatch, size: int, anatomy: Anatomy, mesh: Mesh) -> Iterator[MicroBatch]:
    """Cut a step's rows into micro-batches of `size` and keep this rank's slice of the sequence."""
    columns = [column for column in batch.columns if column != WEIGHTS or _weights_matter(batch)]
    parts = {column.name: _split(batch.values[column.name], size, column.sequences) for column in columns}
    count = len(parts[SAMPLE.name])
    for number in range(count):
        whole = {name: values[number] for name, values in parts.items()}
        mine = {column.name: _slice(whole[column.name], column, mesh) for column in columns}
        yield MicroBatch(mine, anatomy.family.arguments(anatomy.model, whole), last=number == count - 1)


def _slice(values: Any, column: Column, mesh: Mesh) -> Any:
    """Return this rank's slice of the sequence, if the column is split over it."""
    if column.kind != "token" or mesh.plan.sp == 1:
        return values
    width = values.shape[1] // mesh.plan.sp
    return values[:, mesh.sequence_rank * width : (mesh.sequence_rank + 1) * width]


def _split(values: Any, size: int, sequences: int) -> Sequence[Any]:
    """Return the values of each micro-batch, in which each sequence of a sample is a separate row."""
    if isinstance(values, Tensor):
        return torch.split(values if sequences == 1 else values.flatten(0, 1), size * sequences)
    return [values[start : start + size] for start in range(0, len(values), size)]


def _weights_matter(batch: StepBatch) -> bool:
    """Return False if all weights are 1: the loss is then summed as without weights, equal bit for bit."""
    if WEIGHTS not in batch.columns:
        return False
    return not torch.equal(batch.values[WEIGHTS.name], (batch.labels != IGNORE).float())


def check_vocabulary(rows: Rows | None, vocabulary: int | None) -> None:
    """Raise DataError for a token outside the model's vocabulary. A GPU would only report a failed assertion."""
    if rows is None or vocabulary is None:
        return
    ids_by_name = {"token": rows.input_ids}
    if LABELS.name in rows.values:
        ids_by_name["label"] = np.where(rows.labels == IGNORE, 0, rows.labels)
    for name, ids in ids_by_name.items():
        strange = np.argwhere((ids < 0) | (ids >= vocabulary))
        if len(strange):
            row, place = strange[0, 0], strange[0, -1]
            raise DataError(
                f"sample {rows.samples[row]} has {name} {ids[tuple(strange[0])]} at position {place}, outside the "
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
