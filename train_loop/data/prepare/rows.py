"""Raw files of all formats → rows.

A file is cut into pieces that can be read independently, so that many tasks can read one large file. Rows keep their
place, so that errors can name it in terms of the file.
"""

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from train_loop.data.files import chunks, open_file, report_damage
from train_loop.data.prepare.columns import BadCell, check_names, check_schema, read_cells
from train_loop.data.prepare.sources import SourceFile
from train_loop.data.strict_json import LINES_OF_LIST, ONE_LINE, read_line
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec

_CHUNK = 4 * 2**20
"""Bytes of rows per chunk."""
_PARQUET_ROWS = (32, 1024)
"""Minimum and maximum rows that are decoded at once; in between, about _BATCH bytes."""
_BATCH = 64 * 2**20
READ_AHEAD = 8 * 2**20
"""Bytes of a column that are read at once: a row group may be larger than memory."""
_NO_COLUMN = "no column"
"""Beginning of the reason of a JSON line without a column of the spec."""
_FOOTERS_AT_ONCE = 16
_FOOTERS_CHECKED = 256
"""Maximum number of Parquet files of a source whose schema is checked before the job runs."""


@dataclass(frozen=True)
class Piece:
    """A part of a file: row groups of Parquet, bytes of other formats."""

    file: SourceFile
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class Row:
    """The requested columns by name, or the reason why the row cannot be read."""

    place: int
    """Row number in Parquet, byte offset of a JSON line, 0 for a text file."""
    values: dict[str, Any]
    wrong: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Some rows of a piece, and the number of its bytes read so far."""

    rows: list[Row]
    read: int


def cut(files: Sequence[SourceFile], size: int) -> list[Piece]:
    """Return pieces of about `size` bytes, in file order. Raises DataError for invalid Parquet."""
    files = [file for file in files if file.size]
    if files and files[0].format == "parquet":
        # Footers can be large: keep only the sizes of their row groups.
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            return [
                Piece(file, number, number + 1, size)
                for file, sizes in zip(files, pool.map(_group_sizes, files), strict=True)
                for number, size in sizes.items()
            ]
    return [piece for file in files for piece in _cut(file, size)]


def _cut(file: SourceFile, size: int) -> list[Piece]:
    if file.format == "text" or file.codec:
        return [Piece(file, 0, file.size, file.size)]
    starts = range(0, file.size, size)
    return [Piece(file, start, min(start + size, file.size), min(size, file.size - start)) for start in starts]


def read_piece(piece: Piece, columns: ColumnsSpec) -> Iterator[Chunk]:
    """Yield the rows of a piece, chunk by chunk. Raises DataError if the file itself cannot be read."""
    with report_damage(piece.file.uri, piece.file.format):
        if piece.file.format == "parquet":
            yield from _parquet_rows(piece, columns)
        elif piece.file.format == "jsonl":
            yield from _json_rows(piece, columns)
        else:
            check_names(piece.file.uri, ["text"], columns.names)
            yield Chunk([_text_row(piece.file)], piece.bytes)


def locate(places: Sequence[tuple[SourceFile, int]]) -> list[str]:
    """Return the place of each row as text, such as `<file>, line 3`; reads each file at most once."""
    lines: dict[tuple[str, int], int] = {}
    for file in {file for file, _ in places if file.format == "jsonl"}:
        wanted = sorted({place for other, place in places if other == file})
        lines |= {(file.uri, place): line for place, line in zip(wanted, _line_numbers(file, wanted), strict=True)}
    words = {"text": "", "parquet": ", row {place}", "jsonl": ", line {line}"}
    return [
        file.uri + words[file.format].format(place=place, line=lines.get((file.uri, place))) for file, place in places
    ]


def _line_numbers(file: SourceFile, places: list[int]) -> Iterator[int]:
    """Yield the number of the line that begins at each byte offset; the offsets must ascend."""
    line, seen, data, parts = 1, 0, b"", _plain_bytes(file)
    for place in places:
        while seen + len(data) < place:
            line += data.count(b"\n")
            seen += len(data)
            data = next(parts)
        line += data[: place - seen].count(b"\n")
        data, seen = data[place - seen :], place
        yield line


def _group_sizes(file: SourceFile) -> dict[int, int]:
    """Return the uncompressed bytes of each row group that has rows, by its number."""
    footer = _footer(file)
    groups = {number: footer.row_group(number) for number in range(footer.num_row_groups)}
    return {number: group.total_byte_size for number, group in groups.items() if group.num_rows}


def _footer(file: SourceFile) -> Any:
    with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
        return pq.ParquetFile(opened).metadata


def schema_of(file: SourceFile) -> pa.Schema:
    """Return the columns of a Parquet file. Raises DataError for invalid Parquet."""
    return _footer(file).schema.to_arrow_schema()


def is_empty(file: SourceFile) -> bool:
    """Return whether a file has no rows. Raises DataError if its content does not have its format."""
    if not file.size or file.format == "text":
        return not file.size
    if file.format == "parquet":
        return bool(_footer(file).num_rows == 0)
    with report_damage(file.uri, file.format):
        return not any(line.strip() for _, line, _ in _lines(Piece(file, 0, file.size, file.size)))


def check_columns(files: Sequence[SourceFile], columns: ColumnsSpec, *, skip: bool = False) -> None:
    """Raise DataError if a file lacks a column that the spec names, or has it with a type that cannot be read.

    Checks the schemas of Parquet files, or the first rows of the first JSON lines file with rows: if bad rows are
    skipped, one good row among them is enough.
    """
    if files[0].format == "text":
        check_names(files[0].uri, ["text"], columns.names)
    elif files[0].format == "parquet":
        judged_files = [file for file in files if file.size][:_FOOTERS_CHECKED]
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            for file, footer in zip(judged_files, pool.map(_footer, judged_files), strict=True):
                if footer.num_rows:
                    check_schema(file.uri, footer.schema.to_arrow_schema(), columns)
    else:
        file = next(file for file in files if not is_empty(file))
        first = next(read_piece(Piece(file, 0, file.size, file.size), columns), Chunk([], 0)).rows
        judged = first if skip else first[:1]
        if judged and all(row.wrong for row in judged):
            (where,) = locate([(file, judged[0].place)])
            reason = str(judged[0].wrong)
            remedy = "correct the row" + (", or data.columns" if reason.startswith(_NO_COLUMN) else "")
            if not all(row.wrong for row in first):
                remedy += ", or set on_bad_rows: skip"
            raise DataError(f"{where}: {reason}; {remedy}")


def _parquet_rows(piece: Piece, columns: ColumnsSpec) -> Iterator[Chunk]:
    names = list(columns.names)
    with open_file(piece.file, buffer=0) as opened:
        file = pq.ParquetFile(opened, page_checksum_verification=True, pre_buffer=False, buffer_size=READ_AHEAD)
        check_schema(piece.file.uri, file.schema_arrow, columns)
        groups = [file.metadata.row_group(n).num_rows for n in range(piece.stop)]
        first, count = sum(groups[: piece.start]), sum(groups[piece.start :])
        place, at_once = first, rows_at_once(count, piece.bytes)
        for batch in file.iter_batches(at_once, row_groups=list(range(piece.start, piece.stop)), columns=names):
            some = max(1, _CHUNK * len(batch) // max(batch.nbytes, 1))
            for start in range(0, len(batch), some):
                values = [read_cells(column) for column in batch.slice(start, some).select(names).columns]
                cells = enumerate(zip(*values, strict=True), start=place)
                rows = [_row(number, dict(zip(names, row, strict=True))) for number, row in cells]
                place += len(rows)
                yield Chunk(rows, piece.bytes * (place - first) // count)


def rows_at_once(count: int, size: int) -> int:
    """Return how many of `count` rows of Parquet, of `size` bytes together, are decoded at once."""
    least, most = _PARQUET_ROWS
    return max(least, min(most, _BATCH * count // max(size, 1)))


def _row(place: int, cells: dict[str, Any]) -> Row:
    bad = next((f"column {name!r} {cell.reason}" for name, cell in cells.items() if isinstance(cell, BadCell)), None)
    return Row(place, {} if bad else cells, bad)


def _text_row(file: SourceFile) -> Row:
    content = b"".join(_plain_bytes(file))
    try:
        return Row(0, {"text": content.decode("utf-8-sig")})  # a byte order mark is not text
    except UnicodeDecodeError as error:
        return Row(0, {}, f"not UTF-8 text: {error}")


def _json_rows(piece: Piece, columns: ColumnsSpec) -> Iterator[Chunk]:
    rows, size = [], 0
    for place, line, read in _lines(piece):
        if not line.strip():
            continue
        rows.append(_json_row(place, line, columns))
        size += len(line)
        if size > _CHUNK:
            yield Chunk(rows, read)
            rows, size = [], 0
    if rows:
        yield Chunk(rows, piece.bytes)


def _json_row(place: int, line: bytes, columns: ColumnsSpec) -> Row:
    try:
        values = read_line(line)
    except ValueError as error:
        return Row(place, {}, f"invalid JSON: {error}")
    if not isinstance(values, dict):
        return Row(place, {}, f"not a JSON object; {LINES_OF_LIST if isinstance(values, list) else ONE_LINE}")
    missing = next((name for name in columns.names if name not in values and name != columns.tools), None)
    if missing is not None:
        return Row(place, {}, f"{_NO_COLUMN} {missing!r}; it has {', '.join(values)}")
    return Row(place, values)


def _lines(piece: Piece) -> Iterator[tuple[int, bytes, int]]:
    """Yield each line that begins in a piece, its offset, and the number of the piece's bytes read so far.

    The last line is read to its end, which may lie after the piece.
    """
    with open_file(piece.file) as opened:
        if piece.file.codec:
            # Offsets refer to the uncompressed text, bytes read to the compressed file.
            lines = _unpacked_lines(opened, piece.file.codec)
            place = 0
            for line in lines:
                yield place, line, opened.tell()
                place += len(line)
            return
        place = piece.start
        if place:
            # The current line began in the previous piece, unless the byte before ended it.
            opened.seek(place - 1)
            place += len(opened.readline()) - 1
        while place < piece.stop and (line := opened.readline()):
            yield place, line, min(place + len(line), piece.stop) - piece.start
            place += len(line)


def _unpacked_lines(opened: Any, codec: str) -> Iterator[bytes]:
    with pa.CompressedInputStream(opened, codec) as stream, io.BufferedReader(stream, _CHUNK) as plain:
        yield from plain


def _plain_bytes(file: SourceFile) -> Iterator[bytes]:
    if not file.codec:
        yield from chunks(file, _CHUNK)
        return
    with open_file(file) as opened, pa.CompressedInputStream(opened, file.codec) as plain:
        while data := plain.read(_CHUNK):
            yield data
