"""Reading of an inference job's results: its committed shards, in the order of the rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from train_loop.run_dir import RunDir, read_whole


def read_rows(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """Yield the rows of all committed shards. Raises storage errors."""
    for table in _tables(run_dir):
        yield from table.to_pylist()


def dump_row(row: dict[str, Any]) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False)


def write_rows(run_dir: RunDir, file: Path) -> int:
    """Write the rows of all committed shards to one Parquet file; return their number. Raises storage errors."""
    rows, writer = 0, None
    try:
        for table in _tables(run_dir):
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows


def _tables(run_dir: RunDir) -> Iterator[pa.Table]:
    results = run_dir.results
    for number in range(results.complete):
        yield pq.read_table(pa.BufferReader(read_whole(results.shard(number))))
