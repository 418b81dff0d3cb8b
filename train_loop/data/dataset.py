"""Prepared samples on storage: what they are, and reading any of them by index. Needs pyarrow alone."""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from train_loop.data.order import PADDING, Ids
from train_loop.errors import DataError

Tokens = NDArray[np.int32]
IGNORE = -100
"""A label that is not trained on."""


class ShardFile(BaseModel):
    """A Parquet file of samples."""

    model_config = ConfigDict(frozen=True)
    path: str
    rows: int


class Dataset(BaseModel):
    """data/dataset.json: the samples of a run, sample i being row i of the files in their order."""

    model_config = ConfigDict(frozen=True)
    fingerprint: str
    files: tuple[ShardFile, ...]
    sequence_length: int
    input_ids: str = "input_ids"
    labels: str | None = None
    documents: str | None = None
    """Column with the lengths of the documents in a sample, in order; without it a sample is one document."""
    pad_token: int = 0
    tokens: int | None = None
    """Tokens in all samples, padding not counted; None in runs that began before they were counted.

    For files that are read as they are, a sample without any counts as one.
    """
    tokenizer: str | None = None

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(file.rows for file in self.files)


@dataclass(frozen=True)
class Rows:
    """Samples as the loop takes them, n of T tokens each.

    `labels` are aligned with `input_ids`, not shifted; `position_ids` restart with every document.
    """

    samples: Ids  # [n]
    lengths: Tokens  # [n] tokens that are not padding
    input_ids: Tokens  # [n, T]
    labels: Tokens  # [n, T]
    position_ids: Tokens  # [n, T]

    def to_arrow(self) -> pa.Table:
        """The rows as a table that travels through Ray Data."""
        columns: dict[str, Any] = {"sample": self.samples, "length": self.lengths}
        for name in ("input_ids", "labels", "position_ids"):
            values = getattr(self, name)
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        return pa.table(columns)

    @classmethod
    def from_arrow(cls, table: pa.Table) -> "Rows":
        """The inverse of `to_arrow`."""
        table = table.combine_chunks()
        samples = table["sample"].to_numpy()

        def matrix(name: str) -> Tokens:
            flat: Tokens = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            return flat.reshape(len(samples), -1)

        return cls(samples, table["length"].to_numpy(), matrix("input_ids"), matrix("labels"), matrix("position_ids"))

    def slice(self, start: int, stop: int) -> "Rows":
        """Rows start to stop."""
        return Rows(*(getattr(self, field.name)[start:stop] for field in fields(self)))


def read_rows(dataset: Dataset, samples: Ids) -> Rows:
    """Read samples by index, in the given order; PADDING gives rows without a token to train on.

    Raises DataError for a row that does not fit the sequence length.
    """
    n, length = len(samples), dataset.sequence_length
    rows = Rows(
        samples.astype(np.int64),
        np.zeros(n, np.int32),
        np.full((n, length), dataset.pad_token, np.int32),
        np.full((n, length), IGNORE, np.int32),
        np.tile(np.arange(length, dtype=np.int32), (n, 1)),
    )
    ends = np.cumsum([file.rows for file in dataset.files])
    if n and samples.max(initial=PADDING) >= ends[-1]:
        raise IndexError(f"sample {samples.max()} of a dataset of {ends[-1]}")
    file_of = np.searchsorted(ends, samples, side="right")
    for number in np.unique(file_of[samples != PADDING]):
        file = dataset.files[number]
        places = np.flatnonzero((file_of == number) & (samples != PADDING))
        local = samples[places] - (ends[number] - file.rows)
        _fill(rows, dataset, file, places, local)
    return rows


def _fill(rows: Rows, dataset: Dataset, file: ShardFile, places: Ids, local: Ids) -> None:
    table, index = _take(file.path, tuple(_columns(dataset)), local)
    for place, row in zip(places, index, strict=True):
        ids = _values(table[dataset.input_ids], row)
        if len(ids) > dataset.sequence_length:
            raise DataError(
                f"{file.path}: sample {rows.samples[place]} has {len(ids)} tokens, more than "
                f"sequence_length={dataset.sequence_length}; raise it, or set packing: true"
            )
        labels = _values(table[dataset.labels], row) if dataset.labels else ids
        if len(labels) != len(ids):
            raise DataError(
                f"{file.path}: sample {rows.samples[place]} has {len(ids)} tokens and {len(labels)} labels; "
                "they must be aligned"
            )
        rows.lengths[place] = len(ids)
        rows.input_ids[place, : len(ids)] = ids
        rows.labels[place, : len(ids)] = labels
        documents = _values(table[dataset.documents], row) if dataset.documents else [len(ids)]
        rows.position_ids[place] = _positions(documents, dataset.sequence_length)


def _positions(documents: Any, length: int) -> Tokens:
    """Positions that restart with every document.

    Padding goes on where the last one ends, which sees nothing of what follows it: a row of one document then needs no
    mask to be kept from its padding.
    """
    starts = (np.cumsum(documents) - documents).astype(np.int64)
    starts = starts[starts < length]
    restart = np.zeros(length, np.int64)
    restart[starts] = starts
    return (np.arange(length) - np.maximum.accumulate(restart)).astype(np.int32)


def _columns(dataset: Dataset) -> list[str]:
    return [name for name in (dataset.input_ids, dataset.labels, dataset.documents) if name is not None]


def _take(path: str, columns: tuple[str, ...], local: Ids) -> tuple[pa.Table, Ids]:
    """The row groups that hold the wanted rows, and where in them each row stands."""
    file = _open(path)
    metadata = file.metadata
    ends = np.cumsum([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])
    group_of = np.searchsorted(ends, local, side="right")
    groups = np.unique(group_of)
    table = pa.concat_tables([_group(path, int(g), columns) for g in groups]).combine_chunks()
    sizes = np.array([metadata.row_group(int(g)).num_rows for g in groups])
    begins = np.cumsum(sizes) - sizes
    index = np.searchsorted(groups, group_of)
    return table, begins[index] + local - (ends[group_of] - sizes[index])


@lru_cache(maxsize=2)
def _group(path: str, group: int, columns: tuple[str, ...]) -> pa.Table:
    # Kept, because files with a million rows to a group are common, and a step in file order takes a few of them.
    return _open(path).read_row_group(group, columns=list(columns))


@lru_cache(maxsize=64)
def _open(path: str) -> pq.ParquetFile:
    return pq.ParquetFile(path)


def _values(column: pa.ChunkedArray, row: int) -> NDArray[np.int64]:
    values: NDArray[np.int64] = column[int(row)].values.to_numpy(zero_copy_only=False)
    return values
