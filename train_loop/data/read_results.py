"""Reading of an inference job's results: its committed shards, in the order of the rows, and pages of them as JSON."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from train_loop.run_dir import ResultsDir, RunDir, is_remote, open_file, read_whole, storage_failed
from train_loop.spec import DataSpec, InferJobSpec

_AT_ONCE = 64
"""Rows that are read at once of a row group of at most `_GROUP_BYTES`; of a larger one, each row is read alone."""
_GROUP_BYTES = 1 << 26
_NUMBER_BYTES = 8
_NO_NUMBERS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def results_schema(spec: InferJobSpec) -> pa.Schema:
    """Return the columns of a job's results: the row's id, its own columns, its number of tokens, and the output."""
    columns = {"row": pa.int64(), **_input_columns(spec.data), "tokens": pa.int32(), **_output_columns(spec)}
    return pa.schema(columns.items())


def _input_columns(data: DataSpec) -> dict[str, pa.DataType]:
    found = dict[str, pa.DataType]()
    for columns in map(data.columns_of, data.sources):
        found |= dict.fromkeys(columns.texts, pa.large_string())
        # Their types differ between files; JSON holds all of them.
        found |= dict.fromkeys(filter(None, (columns.messages, columns.tools)), pa.large_string())
        if columns.input_ids is not None:
            found[columns.input_ids] = pa.large_list(pa.int64())
    return found


def _output_columns(spec: InferJobSpec) -> dict[str, pa.DataType]:
    numbers = pa.list_(pa.float32())
    if spec.infer.output != "generate":
        return {
            "logprobs": {"logprobs": numbers},
            "perplexity": {"perplexity": pa.float64()},
            "embeddings": {"embedding": numbers},
        }[spec.infer.output]
    text = {"generated": pa.large_string()} if spec.data.reads_text else {}
    logprobs = {"generated_logprobs": numbers} if spec.infer.generation.logprobs else {}
    return {**text, "generated_tokens": pa.list_(pa.int32()), **logprobs, "finish_reason": pa.string()}


def read_rows(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """Yield the rows of all committed shards. Raises storage errors."""
    for table in read_tables(run_dir):
        yield from table.to_pylist()


def dump_row(row: dict[str, Any], *, ensure_ascii: bool = False) -> str:
    """Return a row as a line of JSON. Numbers that JSON does not have become text, such as "Infinity"."""
    try:
        return json.dumps(row, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        return json.dumps(_in_json(row), ensure_ascii=ensure_ascii)


def _in_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_in_json(one) for one in value]
    return _NO_NUMBERS.get(value, "NaN") if isinstance(value, float) and not math.isfinite(value) else value


def read_json(rows: Sequence[Mapping[str, Any]], spec: InferJobSpec) -> pa.Table:
    """Return rows of a page, which are plain JSON, with the types of the results."""
    schema = results_schema(spec)
    return pa.Table.from_pylist(
        [{one.name: _as_number(row[one.name], one.type) for one in schema} for row in rows], schema
    )


def _as_number(value: Any, kind: pa.DataType) -> Any:
    """Return a value whose numbers may be text, because JSON does not have them."""
    if pa.types.is_list(kind) and value is not None:
        return [_as_number(one, kind.value_type) for one in value]
    return float(value) if pa.types.is_floating(kind) and isinstance(value, str) else value


def write_tables(tables: Iterable[pa.Table], spec: InferJobSpec, file: Path) -> int:
    """Write tables of results to one new Parquet file; return the number of rows. A failure leaves no file."""
    rows = 0
    try:
        with pq.ParquetWriter(file, results_schema(spec)) as writer:
            for table in tables:
                writer.write_table(table)
                rows += table.num_rows
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return rows


def read_page(run_dir: RunDir, *, after: int | None, limit: int, most_bytes: int) -> str:
    """Return the rows after a row's id as JSON: at most `limit`, and at most `most_bytes` bytes beyond the first.

    Raises storage errors, and pyarrow's for a damaged file.
    """
    start, found, size, more = 0 if after is None else after + 1, list[str](), 0, False
    for row in _rows_from(run_dir, start):
        # The reader of the pipe may expect any encoding.
        text = dump_row(row, ensure_ascii=True)
        size += len(text)
        more = len(found) == limit or (bool(found) and size > most_bytes)
        if more:
            break
        found.append(text)
    last = start + len(found) - 1
    end = json.dumps({"has_more": more, "next": str(last) if last >= 0 else None})
    return f'{{"data": [{", ".join(found)}], {end[1:]}'


def _rows_from(run_dir: RunDir, start: int) -> Iterator[dict[str, Any]]:
    """Yield the committed rows from an id on, some at once, so that large shards need no more memory."""
    results = run_dir.results
    if not results.complete:
        # The run directory of a queued job may not exist yet.
        return
    spec = run_dir.spec()
    assert isinstance(spec, InferJobSpec), "only inference has results"
    first, skipped = divmod(start, spec.infer.rows_per_shard)
    for number in range(first, results.complete):
        with _open(results, number) as file:
            for batch in _batches(file):
                # One by one: a text that a dictionary has once may be the value of many rows.
                for place in range(skipped, batch.num_rows):
                    yield from batch.slice(place, 1).to_pylist()
                skipped = max(skipped - batch.num_rows, 0)
        skipped = 0


def _batches(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a shard, with each text of a dictionary in memory once."""
    described = pq.ParquetFile(file)
    texts = [one.name for one in described.schema_arrow if _is_text(one.type)]
    shard = pq.ParquetFile(file, metadata=described.metadata, read_dictionary=texts)
    for group in range(shard.num_row_groups):
        rows = _AT_ONCE if _bytes_of(shard.metadata.row_group(group)) <= _GROUP_BYTES else 1
        yield from shard.iter_batches(rows, row_groups=[group], use_threads=False)


def _is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary))


def _bytes_of(group: pq.RowGroupMetaData) -> int:
    """Return the bytes of a row group's values in memory, with each text of a dictionary once."""
    columns = map(group.column, range(group.num_columns))
    return sum(max(one.total_uncompressed_size, one.num_values * _NUMBER_BYTES) for one in columns)


def _open(results: ResultsDir, number: int) -> BinaryIO:
    path, below = results.shard(number), results.root.parent
    return BytesIO(read_whole(path, below=below)) if is_remote(path) else open_file(path, below=below)


def read_tables(run_dir: RunDir) -> Iterator[pa.Table]:
    """Yield the committed shards. Raises storage errors."""
    results = run_dir.results
    for number in range(results.complete):
        yield pq.read_table(pa.BufferReader(read_whole(results.shard(number), below=results.root.parent)))


def answer_page(question: Mapping[str, Any]) -> bytes:
    """Return a page of rows as JSON, given `run_dir` and the arguments of `read_page`.

    If the files cannot be read, the answer is {"unreadable": reason}.
    """
    run_dir = RunDir.at(question["run_dir"])
    try:
        page = read_page(run_dir, after=question["after"], limit=question["limit"], most_bytes=question["most_bytes"])
    except MemoryError:  # pyarrow's is an ArrowException, too
        raise
    except Exception as error:
        if not storage_failed(error) and not isinstance(error, pa.ArrowException):
            raise
        page = json.dumps({"unreadable": str(error)})
    return page.encode()
