"""Random access to the samples of a dataset by index, and the stream of a rank without Ray. Needs only pyarrow."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from train_loop.data.columns import DOCUMENTS, INPUT_IDS, LABELS, POSITION_IDS, TARGETS, WEIGHTS
from train_loop.data.dataset import Cells, Dataset, Part, Rows, ShardFile
from train_loop.data.files import File, is_gone, is_local, open_file, report_damage
from train_loop.data.order import PADDING, Ids, StepOrder
from train_loop.data.own_columns import read_own
from train_loop.data.own_files import read_batches
from train_loop.data.prepare.columns import plain_table
from train_loop.data.shards import read_shards, sample_lengths
from train_loop.errors import DataError
from train_loop.plan import MeshPlan
from train_loop.run_dir import is_transient
from train_loop.system.retry import retry_storage

_INT32 = np.iinfo(np.int32)
_RESTORE = "restore it, and clone the job from its newest checkpoint"


@dataclass(frozen=True)
class StreamPlan:
    """The rows that a run still has to read: `steps` optimizer steps from the position `start`."""

    dataset: Dataset
    order: StepOrder
    start: int
    steps: int


def local_stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
    """Yield the same rows as Ray Data's stream; the first of the ranks with the same samples reads them itself."""
    leads = mesh.leads(rank)
    for step in range(plan.steps):
        ids = plan.order.step(plan.start + step * plan.order.global_batch)
        yield read_rows(plan.dataset, ids[mesh.data_rank(rank)]) if leads else None


def read_rows(dataset: Dataset, samples: Ids) -> Rows:
    """Return samples by index, in the given order; PADDING gives rows without a trained token.

    Raises DataError for a row that does not fit the sequence length.
    """
    n, length = len(samples), dataset.sequence_length
    columns = dataset.columns
    rows = Rows({column.name: column.padding(n, length) for column in columns})
    rows.samples[:] = samples
    if POSITION_IDS in columns:
        rows.position_ids[:] = np.arange(length)
    ends = list(accumulate(part.samples for part in dataset.parts))
    if n and samples.max(initial=PADDING) >= ends[-1]:
        raise IndexError(f"sample {samples.max()} is out of range; the dataset has {ends[-1]} samples")
    part_of = np.searchsorted(ends, samples, side="right")
    for number in np.unique(part_of[samples != PADDING]):
        part = dataset.parts[number]
        places = np.flatnonzero((part_of == number) & (samples != PADDING))
        local = samples[places] - (ends[number] - part.samples)
        cells = _cells_of(part, local)
        for place in places:
            try:
                _fill(rows, part, place, next(cells))
            except DataError:
                raise  # It names its file itself.
            except ValueError as error:
                ((file, row),) = _places(part, local[places == place])
                raise DataError(f"{file.path}, row {row} {error}") from error
    return rows


def row_lengths(dataset: Dataset, first: int, stop: int) -> Ids:
    """Return the number of tokens of samples [first, stop). Raises storage errors, DataError."""
    found, start = [np.empty(0, np.int64)], 0
    for part in dataset.parts:
        begin, end = max(first - start, 0), min(stop - start, part.samples)
        if begin < end:
            found.append(
                _lengths_as_it_is(part, begin, end) if part.index is None else sample_lengths(part, begin, end)
            )
        start += part.samples
    return np.concatenate(found)


def _lengths_as_it_is(part: Part, begin: int, end: int) -> Ids:
    assert part.input_ids is not None, "rows of own columns have no tokens"
    found, start = list[Ids](), 0
    for file in part.files:
        first, stop = max(begin - start, 0), min(end - start, file.rows)
        if first < stop:
            cells = _table(file.file, _columns_of(part))[part.input_ids].slice(first, stop - first)
            # A row without a list is reported when it is read.
            found.append(pc.fill_null(pc.list_value_length(cells), 0).to_numpy().astype(np.int64))
        start += file.rows
    return np.concatenate(found)


def _cells_of(part: Part, local: Ids) -> Iterator[Cells]:
    """Yield samples of a part by index, in the requested order."""
    if part.index is None:
        return _read_as_it_is(part, local)
    return read_batches(part, local) if part.own else read_shards(part, local)


def _fill(rows: Rows, part: Part, place: Any, cells: Cells) -> None:
    """Put a sample into its row. Raises ValueError with the reason if it is invalid."""
    if part.input_ids is not None:
        _fill_tokens(rows, place, cells)
    for column in part.own:
        rows.values[column.name][place] = cells[column.name]


def _fill_tokens(rows: Rows, place: Any, cells: Cells) -> None:
    if rows.input_ids.ndim > 2:
        _fill_sequences(rows, place, cells)
        return
    ids, length = cells[INPUT_IDS.name], rows.input_ids.shape[1]
    labels, documents = cells.get(LABELS.name, ids), cells.get(DOCUMENTS.name)
    if documents is None:
        documents = np.array([len(ids)])
    if len(ids) > length:
        raise ValueError(f"has {len(ids)} tokens, more than sequence_length={length}; raise it, or set packing: true")
    if len(labels) != len(ids):
        raise ValueError(f"has {len(ids)} tokens and {len(labels)} labels; they must be aligned")
    rows.lengths[place] = len(ids)
    if len(documents) > 1:
        rows.position_ids[place] -= _starts(documents, length)
    per_token = {INPUT_IDS.name: ids, LABELS.name: labels}
    if WEIGHTS.name in cells:
        per_token[WEIGHTS.name] = _per_token(cells[WEIGHTS.name], documents)
    if TARGETS.name in cells:
        rows.targets[place] = _label(cells[TARGETS.name])
    for name, values in per_token.items():
        rows.values[name][place, : len(ids)] = values


def _fill_sequences(rows: Rows, place: Any, cells: Cells) -> None:
    """Put a sample of several sequences into its row; its documents are the sequences."""
    ids, sizes = cells[INPUT_IDS.name], cells[DOCUMENTS.name]
    rows.lengths[place] = sizes
    for number, stop in enumerate(np.cumsum(sizes).tolist()):
        rows.input_ids[place, number, : sizes[number]] = ids[stop - sizes[number] : stop]
    if TARGETS.name in cells:
        rows.targets[place] = cells[TARGETS.name][0]


def _per_token(weights: NDArray[Any], documents: NDArray[Any]) -> NDArray[Any]:
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError(f"has weight {weights[0]}; expected 0 or more")
    return np.repeat(weights, documents)


def _label(targets: NDArray[Any]) -> Any:
    (label,) = targets
    if not np.isfinite(label):
        raise ValueError(f"has label {label}; expected a finite number")
    return label


def _starts(documents: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the start of each position's document: positions restart with every document.

    Padding continues the positions of the last document, which does not attend to later tokens. A row of one document
    therefore needs no mask for its padding.
    """
    sizes = documents.copy()
    sizes[-1] += length - documents.sum()
    return np.repeat(np.cumsum(documents) - documents, sizes)


def _read_as_it_is(part: Part, local: Ids) -> Iterator[Cells]:
    """Yield rows of Parquet files that are read without preparation."""
    for file, rows in groupby(_places(part, local), key=itemgetter(0)):
        table = _table(file.file, _columns_of(part))
        for _, row in rows:
            yield _cells(part, table, row)


def _columns_of(part: Part) -> tuple[str, ...]:
    """Return the columns that are read, which are the key of the kept tables."""
    return (*part.stored.values(), *(column.name for column in part.own))


def _places(part: Part, local: Ids) -> Iterator[tuple[ShardFile, int]]:
    """Yield the file of each sample and its row in that file."""
    ends = np.cumsum([file.rows for file in part.files])
    for number, sample in zip(np.searchsorted(ends, local, side="right"), local, strict=True):
        file = part.files[number]
        yield file, int(sample - ends[number]) + file.rows


def _cells(part: Part, table: pa.Table, row: int) -> Cells:
    """Return a sample's cells. Raises ValueError for a row that cannot be trained on."""
    tokens = {
        column.name: _number(table[name][row], name)
        if column in (WEIGHTS, TARGETS)
        else _tokens(table[name][row], name)
        for column, name in part.stored.items()
    }
    return tokens | {column.name: read_own(table[column.name][row], column) for column in part.own}


def _tokens(cell: Any, name: str) -> NDArray[Any]:
    if not cell.is_valid or cell.values.null_count:
        raise ValueError(f"has null in column {name!r} where a list of tokens is needed")
    values: NDArray[Any] = cell.values.to_numpy(zero_copy_only=False)
    if len(values) and values.dtype != np.int32 and not (_INT32.min <= values.min() and values.max() <= _INT32.max):
        raise ValueError(f"has a token outside 32 bits in column {name!r}")
    return values


def _number(cell: Any, name: str) -> NDArray[Any]:
    """Return the weight or label of a row as that of its only document."""
    if not cell.is_valid:
        raise ValueError(f"has null in column {name!r} where a number is needed")
    return np.array([cell.as_py()], np.float32)


def _table(file: File, columns: tuple[str, ...]) -> pa.Table:
    """Return a file's columns. Retries while the storage is unavailable, as for all files that a run reads.

    Raises DataError for a file that was deleted or replaced during the run.
    """
    try:
        return retry_storage(partial(_whole, file, columns), may_pass=partial(_may_pass, file))
    except FileNotFoundError as error:
        if _may_pass(file, error):
            raise
        raise DataError(f"{file.uri} not found: it was deleted or moved during the run; {_RESTORE}") from error


def _may_pass(file: File, error: BaseException) -> bool:
    """Return whether an error means that the storage is unavailable; an unmounted folder is missing or empty."""
    if not isinstance(error, FileNotFoundError):
        return is_transient(error)
    folder = os.path.dirname(file.uri)
    return os.path.isabs(folder) and is_gone(Path(folder))


@lru_cache(maxsize=1024)
def _whole(file: File, columns: tuple[str, ...]) -> pa.Table:
    with report_damage(file.uri, "parquet"), open_file(file, buffer=0) as opened:
        if is_local(file.uri) and os.fstat(opened.fileno()).st_size != file.size:
            raise DataError(f"{file.uri} has changed during the run; {_RESTORE}")
        return plain_table(pq.ParquetFile(opened, page_checksum_verification=True).read(columns=list(columns)))
