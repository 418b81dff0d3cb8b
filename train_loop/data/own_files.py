"""Large sources of own columns as Arrow files, from which single rows are read, so that no process holds all rows."""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
from pyarrow import types

from train_loop.data.dataset import Cells, Part, ShardFile
from train_loop.data.files import open_file, report_damage
from train_loop.data.order import Ids
from train_loop.data.own_columns import has_null, read_own
from train_loop.data.prepare.columns import plain_table, plain_type
from train_loop.data.prepare.sources import SourceFile
from train_loop.data.shards import may_pass
from train_loop.errors import DataError
from train_loop.system.retry import retry_storage

_INDEX = "batches.bin"
_RECORD = np.dtype("<u4")
"""Index record of a file: the rows of each of its batches but the last."""
_BATCH_BYTES, _MOST_ROWS = 256 * 2**10, 4096
"""Bytes and rows of a batch at most, unless one row is larger: a row is read with its batch."""
_READ_AHEAD = 2**20


def write_own(part: Part, files: Sequence[SourceFile], folder: Path) -> Part:
    """Write the rows of a source durably into a folder, and return its samples. Raises DataError for null."""
    written, sizes = list[ShardFile](), list[int]()
    for source in files:
        with report_damage(source.uri, source.format), open_file(source, buffer=0) as opened:
            file = pq.ParquetFile(opened, page_checksum_verification=True, pre_buffer=False, buffer_size=_READ_AHEAD)
            if file.metadata.num_rows:
                sizes.append(_rows_of_batches(file))
                path = folder / f"part-{len(written):05d}.arrow"
                written.append(_write(source, file, [column.name for column in part.own], sizes[-1], path))
    with (folder / _INDEX).open("wb") as index:
        index.write(np.array(sizes, _RECORD).tobytes())
        index.flush()
        os.fsync(index.fileno())
    return part.model_copy(update={"files": tuple(written), "index": str(folder / _INDEX)})


def index_bytes(part: Part) -> int:
    """Return the size of the index that `write_own` writes."""
    return len(part.files) * _RECORD.itemsize


def _rows_of_batches(file: pq.ParquetFile) -> int:
    footer = file.metadata
    size = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    return max(1, min(_MOST_ROWS, int(_BATCH_BYTES * footer.num_rows // max(size, 1))))


def _write(source: SourceFile, file: pq.ParquetFile, names: list[str], rows: int, path: Path) -> ShardFile:
    place = 0
    with path.open("wb") as target:
        kinds = {name: _without_dictionary(plain_type(file.schema_arrow.field(name).type)) for name in names}
        schema = pa.schema(list(kinds.items()))
        with ipc.new_file(target, schema) as writer:
            for table in _of_equal_size(file.iter_batches(rows, columns=names), rows):
                _check_values(source, table, place)
                writer.write_table(table.select(names).cast(schema))
                place += len(table)
        target.flush()
        os.fsync(target.fileno())
    return ShardFile(path=str(path), rows=place, size=path.stat().st_size)


def _of_equal_size(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Yield tables of `rows` rows in one chunk; the last may have fewer. Batches of Parquet end with row groups."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        table = pa.Table.from_batches([*held, batch])
        while len(table) >= rows:
            yield plain_table(table.slice(0, rows))
            table = table.slice(rows)
        held = table.to_batches()
    if sum(map(len, held)):
        yield plain_table(pa.Table.from_batches(held))


def _without_dictionary(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries: an Arrow file has one for all its batches, and Parquet one for each part."""
    if types.is_dictionary(kind):
        return kind.value_type
    if types.is_fixed_size_list(kind):
        return pa.list_(_without_dictionary(kind.value_type), kind.list_size)
    return pa.large_list(_without_dictionary(kind.value_type)) if types.is_list(kind) else kind


def _check_values(source: SourceFile, table: pa.Table, place: int) -> None:
    """Raise DataError for the first row with null, by its number in the source's file."""
    for name in table.column_names:
        (values,) = table[name].chunks
        if has_null(values):
            row = next(row for row in range(len(values)) if has_null(values.slice(row, 1)))
            raise DataError(f"{source.uri}, row {place + row} has null in column {name!r}; fill it, or remove the row")


def read_batches(part: Part, local: Ids) -> Iterator[Cells]:
    """Yield prepared rows by index, in the requested order. Retries while the storage is unavailable."""
    ends = np.cumsum([file.rows for file in part.files])
    for number, sample in zip(np.searchsorted(ends, local, side="right").tolist(), local.tolist(), strict=True):
        row = sample - int(ends[number]) + part.files[number].rows
        yield retry_storage(partial(_read, part, number, row), may_pass=may_pass)


def _read(part: Part, number: int, row: int) -> dict[str, Any]:
    assert part.index is not None
    try:
        batch, place = divmod(row, _sizes(part.index)[number])
        values = _opened(part.files[number].path).get_batch(batch)
        return {column.name: read_own(values[column.name][place], column) for column in part.own}
    except OSError:
        # Files that were opened before an unmount can stay stale forever.
        _opened.cache_clear()
        raise


@lru_cache(maxsize=16)
def _sizes(index: str) -> list[int]:
    sizes: list[int] = np.fromfile(index, _RECORD).tolist()
    return sizes


@lru_cache(maxsize=256)
def _opened(path: str) -> ipc.RecordBatchFileReader:
    """Open a file to read. It is not mapped into memory: a truncated map would kill the process."""
    return ipc.open_file(pa.OSFile(path))
