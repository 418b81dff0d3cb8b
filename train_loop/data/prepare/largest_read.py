"""The largest part of the data that one task of preparation reads at once, from sizes of files, groups and lines."""

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow.parquet as pq

from train_loop.data.files import open_file, report_damage
from train_loop.data.prepare.rows import READ_AHEAD, rows_at_once
from train_loop.data.prepare.sources import SourceFile, list_files
from train_loop.plan import LargestRead
from train_loop.spec import ColumnsSpec, SourceSpec

_FILES = 8
"""Number of a source's largest files that are opened."""
_LONGEST_LINE = 64 * 2**20
"""Maximum bytes that are read in search of the end of a file's first line."""

Placed = tuple[str, SourceSpec, ColumnsSpec]
"""JSON pointer, source, and columns."""


def largest_read(sources: Iterable[Placed]) -> LargestRead | None:
    """Return the read that needs most memory; None without files. Raises DataError and OSError for unreadable files.

    The largest files of each source are opened. Lines after a file's first one, and the uncompressed size of compressed
    files, are not known.
    """
    reads = (read for placed in sources for read in _reads(*placed))
    return max(reads, key=lambda read: read.group_bytes + read.row_bytes, default=None)


def _reads(pointer: str, source: SourceSpec, columns: ColumnsSpec) -> Iterator[LargestRead]:
    largest = sorted(list_files(source), key=lambda file: -file.size)[:_FILES]
    for file in (file for file in largest if file.size):
        sizes = _parquet_sizes(file, columns) if file.format == "parquet" else [(0, 0, _row_bytes(file))]
        for packed, batch, row in sizes:
            yield LargestRead(f"{pointer}/path", file.uri, file.format, packed, batch, row, text=not columns.tokenised)


def _row_bytes(file: SourceFile) -> int:
    """Return the bytes of a text file, which is one row, or of the first JSON line; 0 for compressed lines."""
    if file.format == "text":
        return file.size
    if file.codec:
        return 0
    with report_damage(file.uri, file.format), open_file(file) as opened:
        return len(opened.readline(_LONGEST_LINE))


def _parquet_sizes(file: SourceFile, columns: ColumnsSpec) -> Iterator[tuple[int, int, int]]:
    """Yield the compressed bytes of each row group that are read ahead, and the bytes of a batch and of a mean row."""
    with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
        footer = pq.ParquetFile(opened).metadata
    for group in map(footer.row_group, range(footer.num_row_groups)):
        if not group.num_rows:
            continue
        used = [one for one in _columns(group) if one.path_in_schema.split(".")[0] in columns.names]
        packed = sum(min(one.total_compressed_size, READ_AHEAD) for one in used)
        plain = sum(one.total_uncompressed_size for one in used)
        rows = min(rows_at_once(group.num_rows, group.total_byte_size), group.num_rows)
        yield packed, plain * rows // group.num_rows, plain // group.num_rows


def _columns(group: Any) -> Iterator[Any]:
    return map(group.column, range(group.num_columns))
