"""The largest part of the data that one task of preparation reads at once, from sizes of files, groups and lines."""

import io
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from train_loop.data.files import open_file, report_damage
from train_loop.data.prepare.rows import READ_AHEAD, rows_at_once
from train_loop.data.prepare.sources import SourceFile, list_files
from train_loop.plan import TOKENIZER_TEXT, LargestRead
from train_loop.spec import ColumnsSpec, SourceSpec

_FILES = 8
"""Number of a source's largest files that are opened."""
_LONGEST_LINE = 64 * 2**20
"""Maximum bytes that are read in search of the end of a line."""
_PLACES, _PLACE_BYTES = 32, 2**16
"""Number of places of a file of JSON lines that are looked at, and the bytes that are read at each."""
_PLACES_AT_ONCE = 16
_UNPACKED = 16 * 2**20
"""Maximum bytes of a compressed file that are unpacked."""

Placed = tuple[str, SourceSpec, ColumnsSpec]
"""JSON pointer, source, and columns."""


def largest_read(sources: Iterable[Placed]) -> LargestRead | None:
    """Return the read that needs most memory; None without files. Raises DataError and OSError for unreadable files.

    The largest files of each source are opened. Of JSON lines, evenly spaced places are looked at, and the beginning of
    compressed files.
    """
    listed = [(pointer, columns, list_files(source)) for pointer, source, columns in sources]
    reads = [read for one in listed for read in _reads(*one)]
    largest = max(reads, key=lambda read: read.group_bytes + read.row_bytes, default=None)
    if largest is None:
        return None
    corpus = sum(read.corpus for read in reads) + sum(_unopened_text(files) for _, _, files in listed)
    return replace(largest, corpus=corpus, unseen=max(read.unseen for read in reads))


def _by_size(files: list[SourceFile]) -> list[SourceFile]:
    return sorted(files, key=lambda file: -file.size)


def _unopened_text(files: list[SourceFile]) -> int:
    """Return the bytes of text in the files that are not opened. Those of Parquet files are not known: the maximum."""
    return sum(TOKENIZER_TEXT if file.format == "parquet" else file.size for file in _by_size(files)[_FILES:])


def _reads(pointer: str, columns: ColumnsSpec, files: list[SourceFile]) -> Iterator[LargestRead]:
    for file in (file for file in _by_size(files)[:_FILES] if file.size):
        of_file = partial(LargestRead, f"{pointer}/path", file.uri, file.format, text=not columns.tokenised)
        if file.format == "parquet":
            for packed, batch, row, plain in _parquet_sizes(file, columns):
                yield of_file(packed, batch, row, corpus=plain)
        else:
            row, unseen = (file.size, 0) if file.format == "text" else _line_bytes(file)
            yield of_file(0, 0, row, corpus=file.size, unseen=unseen)


def _line_bytes(file: SourceFile) -> tuple[int, int]:
    """Return the bytes of the longest JSON line that is found, and those that a line may have beyond it unseen."""
    with report_damage(file.uri, file.format):
        if file.codec:
            return _packed_line_bytes(file)
        step = -(-file.size // _PLACES)
        if step <= _PLACE_BYTES:
            return _longest(file, 0, file.size), 0
        starts = range(0, file.size, step)
        # Threads read by the policy and the timeouts of this one.
        reads = [partial(copy_context().run, _longest, file, start, _PLACE_BYTES) for start in starts]
        with ThreadPoolExecutor(_PLACES_AT_ONCE) as pool:
            # A line of two steps or more has a place that lies at least a step before its end.
            return max(pool.map(lambda read: read(), reads)), 2 * step


def _longest(file: SourceFile, start: int, size: int) -> int:
    """Return the bytes of the longest line or part of a line that begins in some bytes of a file."""
    with open_file(file, buffer=_PLACE_BYTES) as opened:
        opened.seek(start)
        lines = opened.read(size).split(b"\n")
        last = len(lines[-1]) + len(opened.readline(_LONGEST_LINE))
    return max(last, *(len(line) + 1 for line in lines[:-1]), 0)


def _packed_line_bytes(file: SourceFile) -> tuple[int, int]:
    """Return the bytes of the longest line in the beginning of a compressed file, and at least those of the rest."""
    with open_file(file) as opened, pa.CompressedInputStream(opened, file.codec) as stream:
        beginning = io.BytesIO(stream.read(_UNPACKED))
        rest = 0 if len(beginning.getbuffer()) < _UNPACKED else file.size
    return max(map(len, beginning), default=0), rest


def _parquet_sizes(file: SourceFile, columns: ColumnsSpec) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each row group the compressed bytes that are read ahead, and those of a batch, a mean row, all rows."""
    with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
        footer = pq.ParquetFile(opened).metadata
    for group in map(footer.row_group, range(footer.num_row_groups)):
        if not group.num_rows:
            continue
        used = [one for one in _columns(group) if one.path_in_schema.split(".")[0] in columns.names]
        packed = sum(min(one.total_compressed_size, READ_AHEAD) for one in used)
        plain = sum(one.total_uncompressed_size for one in used)
        rows = min(rows_at_once(group.num_rows, group.total_byte_size), group.num_rows)
        yield packed, plain * rows // group.num_rows, plain // group.num_rows, plain


def _columns(group: Any) -> Iterator[Any]:
    return map(group.column, range(group.num_columns))
