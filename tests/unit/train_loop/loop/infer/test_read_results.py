"""Pages of results: JSON keeps each value and each type."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.specs import infer_spec
from train_loop.data.read_results import read_json, read_page, read_tables, results_schema, write_tables
from train_loop.run_dir import RunDir
from train_loop.spec import InferJobSpec, parse_any

TEXT: dict[str, Any] = {"data": {"columns": {"text": "text", "input_ids": None}}}
OUTPUTS: dict[str, dict[str, Any]] = {
    "logprobs": {},
    "perplexity": TEXT,
    "embeddings": {},
    "generate": TEXT | {"infer": {"generation": {"logprobs": True}}},
}
SINGLE = np.random.default_rng(0).normal(size=40).astype(np.float32)


def values_of(kind: pa.DataType) -> list[Any]:
    """Return values of a type for four rows, with those that JSON does not have."""
    if pa.types.is_list(kind) and pa.types.is_floating(kind.value_type):
        return [SINGLE, [], [np.inf, -np.inf, np.nan], SINGLE[:3]]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [[1, 2], [], [3], [2**31 - 1]]
    if pa.types.is_floating(kind):
        return [1 / 3, None, np.inf, np.nan]
    return [0, 1, 2, 3] if pa.types.is_integer(kind) else ["", "ä\n", "NaN", '"']


@pytest.mark.parametrize("output", OUTPUTS)
def test_page_has_the_values_and_types_of_the_shards(tmp_path: Path, output: str) -> None:
    parts = OUTPUTS[output]
    spec = parse_any(infer_spec(**parts | {"infer": {"output": output, **parts.get("infer", {})}}))
    assert isinstance(spec, InferJobSpec)
    schema, content, run_dir = results_schema(spec), io.BytesIO(), RunDir(tmp_path / "run")
    table = pa.table([pa.array(values_of(one.type), one.type) for one in schema], schema)
    pq.write_table(table, content)
    run_dir.write_spec(spec)
    run_dir.results.commit(0, content.getvalue())
    page = json.loads(read_page(run_dir, after=None, limit=10, most_bytes=10**6))
    sent = read_json(page["data"], spec)
    assert sent.schema == schema
    assert repr(sent.to_pylist()) == repr(table.to_pylist())
    assert write_tables(read_tables(run_dir), spec, tmp_path / "all.parquet") == 4
    assert repr(pq.read_table(tmp_path / "all.parquet").to_pylist()) == repr(table.to_pylist())


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    spec = parse_any(infer_spec())
    assert isinstance(spec, InferJobSpec)
    with pytest.raises(KeyError):
        write_tables((read_json([{"row": 1}], spec) for _ in range(1)), spec, tmp_path / "all.parquet")
    assert not list(tmp_path.iterdir())
