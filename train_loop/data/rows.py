"""Raw files → rows: what every format has in common for whoever reads them.

A file is cut into pieces that can be read by themselves, so that one large file is work for many tasks. Rows keep their
place, so that what is wrong with one can be said in the words of its file.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from train_loop.data.files import chunks, open_file
from train_loop.data.sources import SourceFile
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec

_CHUNK = 4 * 2**20
"""Bytes of rows that are handed on together."""
_PARQUET_ROWS = 1024
_FOOTERS_AT_ONCE = 16


@dataclass(frozen=True)
class Piece:
    """A part of a file: row groups of Parquet, bytes of anything else."""

    file: SourceFile
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class Row:
    """The columns asked for, by name; a row that cannot be read has a reason instead."""

    place: int
    """Row of Parquet, byte at which a JSON line begins, 0 of a text."""
    values: dict[str, Any]
    wrong: str | None = None


def cut(files: Sequence[SourceFile], size: int) -> list[Piece]:
    """Pieces of about `size` bytes, in file order. Raises DataError for Parquet that is none."""
    if files and files[0].format == "parquet":
        return [
            Piece(file, n, n + 1, footer.row_group(n).total_byte_size)
            for file, footer in zip(files, parquet_footers(files), strict=True)
            for n in range(footer.num_row_groups)
        ]
    return [piece for file in files for piece in _cut(file, size)]


def _cut(file: SourceFile, size: int) -> list[Piece]:
    if file.format == "text" or file.codec:
        return [Piece(file, 0, file.size, file.size)] if file.size else []
    starts = range(0, file.size, size)
    return [Piece(file, start, min(start + size, file.size), min(size, file.size - start)) for start in starts]


def read_piece(piece: Piece, columns: ColumnsSpec) -> Iterator[list[Row]]:
    """The rows of a piece, some at a time. Raises DataError where the file itself cannot be read."""
    try:
        if piece.file.format == "parquet":
            yield from _parquet_rows(piece, columns)
        elif piece.file.format == "jsonl":
            yield from _json_rows(piece, columns)
        else:
            yield [_text_row(piece.file)]
    except (pa.ArrowException, EOFError) as error:
        raise _unreadable(piece.file, error) from error
    except OSError as error:
        # Arrow calls a damaged file an input/output error; storage that fails names a number, or has been named.
        if error.errno is not None or piece.file.uri in str(error):
            raise
        raise _unreadable(piece.file, error) from error


def locate(file: SourceFile, place: int) -> str:
    """A row's file and place in the words of its format."""
    if file.format == "text":
        return file.uri
    if file.format == "parquet":
        return f"{file.uri}, row {place}"
    line, seen = 1, 0
    for data in _plain_bytes(file):
        line += data[: place - seen].count(b"\n")
        seen += len(data)
        if seen >= place:
            break
    return f"{file.uri}, line {line}"


def parquet_footers(files: Sequence[SourceFile]) -> list[Any]:
    """The footers of Parquet files, some of them at a time. Raises DataError."""
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        return list(pool.map(_footer, files))


def _footer(file: SourceFile) -> Any:
    try:
        with open_file(file, buffer=0) as opened:
            return pq.ParquetFile(opened, page_checksum_verification=True).metadata
    except pa.ArrowException as error:
        raise _unreadable(file, error) from error


def column_names(file: SourceFile) -> list[str]:
    """The columns of a file, by its schema or its first row. Raises DataError."""
    if file.format == "text":
        return ["text"]
    try:
        if file.format == "parquet":
            with open_file(file, buffer=0) as opened:
                return list(pq.ParquetFile(opened, page_checksum_verification=True).schema_arrow.names)
        first = next((line for _, line in _lines(Piece(file, 0, file.size, file.size)) if line.strip()), b"{}")
        row = json.loads(first)
        if not isinstance(row, dict):
            raise ValueError("its first line is not a JSON object")
        return list(row)
    except (pa.ArrowException, ValueError, EOFError) as error:
        raise _unreadable(file, error) from error


def is_empty(file: SourceFile) -> bool:
    """Whether a file holds no rows at all. Raises DataError for a file that is not what its name says."""
    return not file.size or (file.format == "parquet" and _footer(file).num_rows == 0)


def check_columns(file: SourceFile, columns: ColumnsSpec) -> None:
    """Raise DataError where a file lacks a column that the spec names, going by its schema or its first row."""
    present = column_names(file)
    for name in columns.names:
        if name not in present:
            raise DataError(f"{file.uri} has no column {name!r}; it has {', '.join(present)}; correct data.columns")


def _unreadable(file: SourceFile, error: Exception) -> DataError:
    name = {"parquet": "Parquet", "jsonl": "JSON lines", "text": "text"}[file.format]
    return DataError(f"{file.uri} is no readable {name} file: {error}; write it again or leave it out")


def _parquet_rows(piece: Piece, columns: ColumnsSpec) -> Iterator[list[Row]]:
    check_columns(piece.file, columns)
    with open_file(piece.file, buffer=0) as opened:
        file = pq.ParquetFile(opened, page_checksum_verification=True)
        place = sum(file.metadata.row_group(n).num_rows for n in range(piece.start))
        groups = list(range(piece.start, piece.stop))
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=list(columns.names)):
            values = [_cells(batch[name]) for name in columns.names]
            rows = [dict(zip(columns.names, cells, strict=True)) for cells in zip(*values, strict=True)]
            yield [Row(place + n, row) for n, row in enumerate(rows)]
            place += len(rows)


def _cells(column: pa.Array) -> list[Any]:
    kind = column.type
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type):
        # As arrays: a Python number for every token would cost more than all the rest.
        return [cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None for cell in column]
    cells: list[Any] = column.to_pylist()
    return cells


def _text_row(file: SourceFile) -> Row:
    content = b"".join(_plain_bytes(file))
    try:
        return Row(0, {"text": content.decode()})
    except UnicodeDecodeError as error:
        return Row(0, {}, f"no UTF-8 text: {error}")


def _json_rows(piece: Piece, columns: ColumnsSpec) -> Iterator[list[Row]]:
    rows, size = [], 0
    for place, line in _lines(piece):
        if not line.strip():
            continue
        rows.append(_json_row(place, line, columns))
        size += len(line)
        if size > _CHUNK:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _json_row(place: int, line: bytes, columns: ColumnsSpec) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:
        return Row(place, {}, f"no JSON: {error}")
    if not isinstance(values, dict):
        return Row(place, {}, "no JSON object")
    missing = next((name for name in columns.names if name not in values), None)
    if missing is not None:
        return Row(place, {}, f"no column {missing!r}; it has {', '.join(values)}")
    return Row(place, values)


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a piece and where each begins; the last one is read to its end."""
    file, place = piece.file, piece.start
    if file.codec:
        rest = b""
        for data in _plain_bytes(file):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield place, line
                place += len(line) + 1
        yield place, rest
        return
    with open_file(file) as opened:
        if place:
            # The line that goes on here began before, unless the byte before this one ended it.
            opened.seek(place - 1)
            place += len(opened.readline()) - 1
        while place < piece.stop and (line := opened.readline()):
            yield place, line
            place += len(line)


def _plain_bytes(file: SourceFile) -> Iterator[bytes]:
    if not file.codec:
        yield from chunks(file, _CHUNK)
        return
    with open_file(file) as opened, pa.CompressedInputStream(opened, file.codec) as plain:
        while data := plain.read(_CHUNK):
            yield data
