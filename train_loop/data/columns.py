"""The columns of samples. Files, stream and micro-batches loop over these declarations.

n: samples, T: sequence length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import types

Array = TypeVar("Array")


@dataclass(frozen=True)
class Column:
    """A column of samples. Ulysses splits columns of tokens over the sequence, and no others."""

    name: str
    dtype: str
    """numpy's name of the type of its values; `bytes` or `str` for ragged columns of these."""
    kind: Literal["token", "sample", "ragged"] = "token"
    """One value per token: [n, T]. One array per sample: [n, *shape]. Or n lists, byte strings or texts of any size."""
    shape: tuple[int, ...] = ()
    """Shape of the array of a sample."""
    fill: int = field(default=0, compare=False)
    """Value of padding."""
    stored: Literal["token", "document"] | None = None
    """In prepared files: one value per token or per document; None for other columns."""
    sequences: int = field(default=1, compare=False)
    """Sequences per sample, which are the rows of the model's call. Above 1, samples have a dimension for them."""

    def shape_in(self, length: int) -> tuple[int, ...]:
        """Return the shape of a sample's values, with `length` tokens per sequence."""
        shape = (length,) if self.kind == "token" else self.shape
        return shape if self.sequences == 1 else (self.sequences, *shape)

    def bytes_in(self, length: int) -> int:
        """Return the bytes of a sample's values; 0 for ragged columns."""
        if self.kind == "ragged":
            return 0
        return math.prod(self.shape_in(length)) * np.dtype(self.dtype).itemsize

    def padding(self, count: int, length: int) -> Any:
        """Return the values of `count` samples that are padding."""
        if self.kind != "ragged":
            values = np.empty((count, *self.shape_in(length)), self.dtype)
            values.fill(self.fill)
            return values
        empty: dict[str, Any] = {"bytes": b"", "str": ""}
        return [empty[self.dtype] if self.dtype in empty else np.empty(0, self.dtype)] * count


SAMPLE = Column("#sample", "int64", "sample")
"""Number of the sample in its dataset. No column of a file has this name."""
LENGTH = Column("length", "int64", "sample")
"""Tokens that are not padding, of each sequence."""
INPUT_IDS = Column("input_ids", "int32", stored="token")
LABELS = Column("labels", "int32", fill=-100, stored="token")
"""Labels, aligned with the tokens and not shifted."""
WEIGHTS = Column("weights", "float32", fill=1, stored="document")
"""Weight of each token in the loss."""
TARGETS = Column("targets", "float32", "sample", stored="document")
"""Label of each document: its class, or a number; the margin of a pair."""
POSITION_IDS = Column("position_ids", "int32")
"""Positions, which restart with every document."""
DOCUMENTS = Column("documents", "int32", "ragged", stored="document")
"""Lengths of the documents in a sample, in order."""

STORED = (INPUT_IDS, DOCUMENTS, LABELS, WEIGHTS, TARGETS)
"""Columns of prepared files, in their order."""


@lru_cache
def token_columns(
    *, pad_token: int = 0, weighted: bool = False, labelled: bool = False, sequences: int = 1
) -> tuple[Column, ...]:
    """Return the columns of tokens in the training loop. Samples of several sequences have no labels per token."""
    ids = replace(INPUT_IDS, fill=pad_token)
    if sequences > 1:
        each = (replace(column, sequences=sequences) for column in (LENGTH, ids, POSITION_IDS))
        return (SAMPLE, *each, *(TARGETS,) * labelled)
    return (SAMPLE, LENGTH, ids, LABELS, POSITION_IDS, *(WEIGHTS,) * weighted, *(TARGETS,) * labelled)


@dataclass(frozen=True)
class ByColumn(Generic[Array]):
    """Values of samples by column: arrays, or lists for ragged columns. Properties are the columns of tokens."""

    values: Mapping[str, Any]

    @property
    def samples(self) -> Array:
        """Sample numbers [n]."""
        return self._array(SAMPLE)

    @property
    def lengths(self) -> Array:
        """Tokens that are not padding, [n]."""
        return self._array(LENGTH)

    @property
    def input_ids(self) -> Array:
        """Tokens [n, T]."""
        return self._array(INPUT_IDS)

    @property
    def labels(self) -> Array:
        """Labels [n, T]."""
        return self._array(LABELS)

    @property
    def position_ids(self) -> Array:
        """Positions [n, T]."""
        return self._array(POSITION_IDS)

    @property
    def weights(self) -> Array | None:
        """Weights of labels [n, T]; None if all are 1."""
        found: Array | None = self.values.get(WEIGHTS.name)
        return found

    @property
    def targets(self) -> Array:
        """Labels of rows [n]."""
        return self._array(TARGETS)

    def _array(self, column: Column) -> Array:
        found: Array = self.values[column.name]
        return found


def to_arrow(values: Mapping[str, Any]) -> pa.Table:
    """Return values by column as a table, whose types contain their shapes."""
    return pa.table({name: _to_array(column) for name, column in values.items()})


def from_arrow(table: pa.Table) -> dict[str, Any]:
    """Return the values of a table from `to_arrow`."""
    table = table.combine_chunks()
    arrays = {name: table[name].combine_chunks() for name in table.column_names}
    return {name: _ragged(one) if _is_ragged(one.type) else _dense(one) for name, one in arrays.items()}


def _to_array(values: Any) -> pa.Array:
    if isinstance(values, list):
        return _to_ragged_array(values)
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _to_ragged_array(values: list[Any]) -> pa.Array:
    if not isinstance(values[0], np.ndarray):
        return pa.array(values, pa.large_binary() if isinstance(values[0], bytes) else pa.large_string())
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(values)))


def _is_ragged(kind: pa.DataType) -> bool:
    return bool(types.is_large_list(kind) or types.is_large_binary(kind) or types.is_large_string(kind))


def _ragged(array: pa.Array) -> list[Any]:
    if not types.is_large_list(array.type):
        found: list[Any] = array.to_pylist()
        return found
    return [cell.values.to_numpy(zero_copy_only=False) for cell in array]


def _dense(array: pa.Array) -> Any:
    shape = [len(array)]
    while types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).reshape(shape)
