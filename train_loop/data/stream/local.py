"""Random access to the samples of a dataset by index, and the stream of a rank without Ray. Needs only pyarrow."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from train_loop.data.dataset import IGNORE, Cells, Dataset, Part, Rows, ShardFile, Tokens
from train_loop.data.files import File, is_gone, open_file, report_damage
from train_loop.data.order import PADDING, Ids, StepOrder
from train_loop.data.prepare.columns import plain_table
from train_loop.data.shards import read_shards
from train_loop.errors import DataError
from train_loop.plan import MeshPlan
from train_loop.run_dir import is_transient
from train_loop.system.retry import retry_storage

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class StreamPlan:
    """The rows that a run still has to read: `steps` optimizer steps from the position `start`."""

    dataset: Dataset
    order: StepOrder
    start: int
    steps: int


def local_stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
    """Yield the same rows as Ray Data's stream; the first rank of every Ulysses group reads them itself."""
    leads = mesh.sequence_rank(rank) == 0
    for step in range(plan.steps):
        ids = plan.order.step(plan.start + step * plan.order.global_batch)
        yield read_rows(plan.dataset, ids[mesh.data_rank(rank)]) if leads else None


def read_rows(dataset: Dataset, samples: Ids) -> Rows:
    """Return samples by index, in the given order; PADDING gives rows without a trained token.

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
        raise IndexError(f"sample {samples.max()} is out of range; the dataset has {ends[-1]} samples")
    part_of = np.searchsorted(ends, samples, side="right")
    for number in np.unique(part_of[samples != PADDING]):
        part = dataset.parts[number]
        places = np.flatnonzero((part_of == number) & (samples != PADDING))
        local = samples[places] - (ends[number] - part.samples)
        cells = read_shards(part, local) if part.index else _read_as_it_is(part, local)
        for place in places:
            try:
                _fill(rows, place, next(cells))
            except ValueError as error:
                ((file, row),) = _places(part, local[places == place])
                raise DataError(f"{file.path}, row {row} {error}") from error
    return rows


def _fill(rows: Rows, place: Any, cells: Cells) -> None:
    """Put a sample into its row. Raises ValueError with the reason if it is invalid."""
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
            raise ValueError(f"has weight {cells.weights[0]}; expected 0 or more")
        rows.weights[place, : len(ids)] = np.repeat(cells.weights, documents)


def _positions(documents: NDArray[Any], length: int) -> Tokens:
    """Return positions that restart with every document.

    Padding continues the positions of the last document, which does not attend to later tokens. A row of one document
    therefore needs no mask for its padding.
    """
    starts = (np.cumsum(documents) - documents).astype(np.int64)
    starts = starts[starts < length]
    restart = np.zeros(length, np.int64)
    restart[starts] = starts
    return (np.arange(length) - np.maximum.accumulate(restart)).astype(np.int32)


def _read_as_it_is(part: Part, local: Ids) -> Iterator[Cells]:
    """Yield rows of Parquet files that are read without preparation."""
    for file, row in _places(part, local):
        yield _cells(part, _table(file.file, _columns(part)), row)


def _places(part: Part, local: Ids) -> Iterator[tuple[ShardFile, int]]:
    """Yield the file of each sample and its row in that file."""
    ends = np.cumsum([file.rows for file in part.files])
    for number, sample in zip(np.searchsorted(ends, local, side="right"), local, strict=True):
        file = part.files[number]
        yield file, int(sample - ends[number]) + file.rows


def _cells(part: Part, table: pa.Table, row: int) -> Cells:
    """Return a sample's cells. Raises ValueError for a row that cannot be trained on."""

    def values(name: str | None) -> Any:
        return None if name is None else _tokens(table[name][row], name)

    weight = None if part.weights is None else table[part.weights][row].as_py()
    if part.weights is not None and weight is None:
        raise ValueError(f"has null in column {part.weights!r} where a weight is needed")
    weights = None if weight is None else np.array([weight], np.float32)
    return Cells(values(part.input_ids), values(part.labels), values(part.documents), weights)


def _tokens(cell: Any, name: str) -> NDArray[Any]:
    if not cell.is_valid or cell.values.null_count:
        raise ValueError(f"has null in column {name!r} where a list of tokens is needed")
    values: NDArray[Any] = cell.values.to_numpy(zero_copy_only=False)
    if len(values) and values.dtype != np.int32 and not (_INT32.min <= values.min() and values.max() <= _INT32.max):
        raise ValueError(f"has a token outside 32 bits in column {name!r}")
    return values


def _columns(part: Part) -> tuple[str, ...]:
    names = (part.input_ids, part.labels, part.documents, part.weights)
    return tuple(name for name in names if name is not None)


def _table(file: File, columns: tuple[str, ...]) -> pa.Table:
    """Return a file's columns. Retries while the storage is unavailable, as for all files that a run reads."""
    return retry_storage(partial(_whole, file, columns), may_pass=partial(_may_pass, file))


def _may_pass(file: File, error: BaseException) -> bool:
    """Return whether an error means that the storage is unavailable; an unmounted folder is missing or empty."""
    if not isinstance(error, FileNotFoundError):
        return is_transient(error)
    folder = os.path.dirname(file.uri)
    return os.path.isabs(folder) and is_gone(Path(folder))


@lru_cache(maxsize=1024)
def _whole(file: File, columns: tuple[str, ...]) -> pa.Table:
    with report_damage(file.uri, "parquet"), open_file(file, buffer=0) as opened:
        return plain_table(pq.ParquetFile(opened, page_checksum_verification=True).read(columns=list(columns)))
