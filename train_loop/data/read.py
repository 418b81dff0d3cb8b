"""Reading any samples of a dataset by index. Needs pyarrow alone."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from train_loop.data.dataset import IGNORE, Cells, Dataset, Part, Rows, Tokens
from train_loop.data.files import File, open_file
from train_loop.data.order import PADDING, Ids
from train_loop.data.shards import read_shards
from train_loop.errors import DataError


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
        np.ones((n, length), np.float32) if dataset.weighted else None,
    )
    ends = list(accumulate(part.samples for part in dataset.parts))
    if n and samples.max(initial=PADDING) >= ends[-1]:
        raise IndexError(f"sample {samples.max()} of a dataset of {ends[-1]}")
    part_of = np.searchsorted(ends, samples, side="right")
    for number in np.unique(part_of[samples != PADDING]):
        part = dataset.parts[number]
        places = np.flatnonzero((part_of == number) & (samples != PADDING))
        local = samples[places] - (ends[number] - part.samples)
        for place, cells in zip(places, _read(part, local), strict=True):
            try:
                _fill(rows, place, cells)
            except ValueError as error:
                raise DataError(f"{_path(part, local[places == place][0])}: sample {samples[place]} {error}") from error
    return rows


def _read(part: Part, local: Ids) -> Iterable[Cells]:
    return read_shards(part, local) if part.index else _read_as_it_is(part, local)


def _path(part: Part, local: int) -> str:
    ends = np.cumsum([file.rows for file in part.files])
    return part.files[int(np.searchsorted(ends, local, side="right"))].path


def _fill(rows: Rows, place: Any, cells: Cells) -> None:
    """Put a sample into its row. Raises ValueError with what is wrong with it."""
    ids, length = cells.input_ids, rows.input_ids.shape[1]
    if len(ids) > length:
        raise ValueError(f"has {len(ids)} tokens, more than sequence_length={length}; raise it, or set packing: true")
    labels = ids if cells.labels is None else cells.labels
    if len(labels) != len(ids):
        raise ValueError(f"has {len(ids)} tokens and {len(labels)} labels; they must be aligned")
    documents = np.array([len(ids)]) if cells.documents is None else cells.documents
    rows.lengths[place] = len(ids)
    rows.input_ids[place, : len(ids)] = ids
    rows.labels[place, : len(ids)] = labels
    rows.position_ids[place] = _positions(documents, length)
    if rows.weights is not None and cells.weights is not None:
        if not (np.isfinite(cells.weights) & (cells.weights >= 0)).all():
            raise ValueError(f"has weight {cells.weights[0]}; weights are 0 or more")
        rows.weights[place, : len(ids)] = np.repeat(cells.weights, documents)


def _positions(documents: NDArray[Any], length: int) -> Tokens:
    """Positions that restart with every document.

    Padding goes on where the last one ends, which sees nothing of what follows it: a row of one document then needs no
    mask to be kept from its padding.
    """
    starts = (np.cumsum(documents) - documents).astype(np.int64)
    starts = starts[starts < length]
    restart = np.zeros(length, np.int64)
    restart[starts] = starts
    return (np.arange(length) - np.maximum.accumulate(restart)).astype(np.int32)


def _read_as_it_is(part: Part, local: Ids) -> list[Cells]:
    """Rows of somebody's own Parquet files, for which whole row groups are read."""
    ends = np.cumsum([file.rows for file in part.files])
    file_of = np.searchsorted(ends, local, side="right")
    found: dict[int, Cells] = {}
    for number in np.unique(file_of):
        file, places = part.files[number], np.flatnonzero(file_of == number)
        rows = local[places] - (ends[number] - file.rows)
        group_ends = _group_ends(file.file)
        group_of = np.searchsorted(group_ends, rows, side="right")
        for group in np.unique(group_of):
            table, first = _group(file.file, int(group), _columns(part)), int(group_ends[group])
            first -= table.num_rows
            for place, row in zip(places[group_of == group], rows[group_of == group], strict=True):
                found[int(place)] = _cells(part, table, int(row) - first)
    return [found[place] for place in range(len(local))]


def _cells(part: Part, table: pa.Table, row: int) -> Cells:
    def values(name: str | None) -> Any:
        return None if name is None else table[name][row].values.to_numpy(zero_copy_only=False)

    weight = None if part.weights is None else np.array([table[part.weights][row].as_py()], np.float32)
    return Cells(values(part.input_ids), values(part.labels), values(part.documents), weight)


def _columns(part: Part) -> tuple[str, ...]:
    names = (part.input_ids, part.labels, part.documents, part.weights)
    return tuple(name for name in names if name is not None)


@lru_cache(maxsize=2)
def _group(file: File, group: int, columns: tuple[str, ...]) -> pa.Table:
    # Kept, because a step in file order takes a few rows of the same group as the one before.
    return _open(file).read_row_group(group, columns=list(columns))


@lru_cache(maxsize=64)
def _group_ends(file: File) -> NDArray[np.int64]:
    metadata = _open(file).metadata
    return np.cumsum([metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)])


@lru_cache(maxsize=64)
def _open(file: File) -> pq.ParquetFile:
    return pq.ParquetFile(open_file(file, buffer=0))
