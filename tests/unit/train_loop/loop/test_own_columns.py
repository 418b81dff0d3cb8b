"""Columns of users' own models: any values of Parquet reach the micro-batch as pyarrow reads them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from train_loop.data import own_files
from train_loop.data.dataset import Dataset, Part, Rows, ShardFile
from train_loop.data.own_columns import first_rows, own_columns
from train_loop.data.prepare.cache import is_whole
from train_loop.data.prepare.columns import is_list
from train_loop.data.prepare.sources import SourceFile
from train_loop.data.stream.local import read_rows
from train_loop.errors import DataError
from train_loop.loop.batch import micro_batches, share_rows
from train_loop.plan import plan_mesh

ONE_RANK: Any = SimpleNamespace(
    plan=plan_mesh(world=1, fsdp_size=0, ulysses_size=1), device=torch.device("cpu"), sequence_rank=0
)
PLAIN: Any = SimpleNamespace(model=None, family=SimpleNamespace(arguments=lambda *_: {}))
"""Model whose call needs no arguments besides the columns."""


def written(path: Path, table: pa.Table) -> Dataset:
    """Write a table with several row groups, and return a dataset of all its columns."""
    pq.write_table(table, path, row_group_size=3)
    own = own_columns([source_file(path)], table.column_names)
    file = ShardFile(path=str(path), rows=len(table), size=path.stat().st_size)
    part = Part(fingerprint="x", files=(file,), tokens=0, input_ids=None, own=own)
    return Dataset(fingerprint="x", parts=(part,), sequence_length=8)


def prepared(dataset: Dataset) -> Dataset:
    """Return the same rows in Arrow files, whose batches have two rows."""
    (part,) = dataset.parts
    folder = Path(part.files[0].path).with_suffix(".prepared")
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_files, "_MOST_ROWS", 2)
        written = own_files.write_own(part, [source_file(Path(file.path)) for file in part.files], folder)
    assert is_whole(written)
    return dataset.model_copy(update={"parts": (written,)})


def source_file(path: Path) -> SourceFile:
    return SourceFile(str(path), path.stat().st_size, version="", format="parquet", codec=None)


def batched(dataset: Dataset, samples: list[int], size: int) -> dict[str, list[Any]]:
    """Return the values of samples by column, read, sent through Ray Data's form, packed and cut."""
    rows = Rows.from_arrow(read_rows(dataset, np.array(samples)).to_arrow())
    batch = share_rows(rows, count=len(samples), dataset=dataset, mesh=ONE_RANK)
    found: dict[str, list[Any]] = {name: [] for name in batch.values}
    for micro in micro_batches(batch, size, PLAIN, ONE_RANK):
        for name, values in micro.values.items():
            found[name] += list(values)
    return found


def tensors(shape: tuple[int, ...]) -> Callable[[np.random.Generator, int], pa.Array]:
    return lambda draw, n: pa.FixedShapeTensorArray.from_numpy_ndarray(draw.random((n, *shape)).astype(np.float32))


IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
"""Type of images in Hugging Face datasets."""
KINDS: dict[str, Callable[[np.random.Generator, int], pa.Array]] = {
    "int8": lambda draw, n: pa.array(draw.integers(-128, 128, n), pa.int8()),
    "uint64": lambda draw, n: pa.array(draw.integers(0, 2**64, n, np.uint64)),
    "double": lambda draw, n: pa.array(draw.random(n)),
    "half": lambda draw, n: pa.array(draw.random(n).astype(np.float16)),
    "bool": lambda draw, n: pa.array(draw.random(n) < 0.5),
    "list": lambda draw, n: pa.array([draw.random(k).astype(np.float32) for k in draw.integers(0, 4, n)]),
    "fixed": lambda draw, n: pa.array(draw.integers(0, 9, (n, 2, 3)).tolist(), pa.list_(pa.list_(pa.int16(), 3), 2)),
    "tensor": tensors((2, 1, 3)),
    "bytes": lambda draw, n: pa.array([draw.bytes(k) for k in draw.integers(0, 9, n)], pa.binary()),
    "text": lambda draw, n: pa.array([f"é{k}" for k in draw.integers(0, 9, n)]),
    "dictionary": lambda draw, n: pa.array(["a" * int(k) for k in draw.integers(1, 4, n)]).dictionary_encode(),
    "image": lambda draw, n: pa.array([{"bytes": draw.bytes(3), "path": None} for _ in range(n)], IMAGE),
}


def plain(value: Any) -> Any:
    """Return a value of a batch, or of pyarrow, as Python has it."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    return value["bytes"] if isinstance(value, dict) else value


def expected(column: pa.ChunkedArray, samples: list[int]) -> list[Any]:
    """Return pyarrow's values."""
    array = column.combine_chunks()
    if isinstance(array, pa.FixedShapeTensorArray):
        array = array.to_numpy_ndarray()
        return [array[sample].tolist() for sample in samples]
    return [plain(array[sample].as_py()) for sample in samples]


@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5),
    names=st.lists(
        st.sampled_from(
            ["labels", "weights", "input_ids", "length", "sample", "position_ids", "documents", "é ü", "x"]
        ),
        min_size=5,
        max_size=5,
        unique=True,
    ),
    size=st.integers(1, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
def test_values_of_any_column_arrive_as_pyarrow_reads_them(
    tmp_path: Path, seed: int, kinds: list[str], names: list[str], size: int
) -> None:
    draw = np.random.default_rng(seed)
    table = pa.table({name: KINDS[kind](draw, 7) for name, kind in zip(names, kinds, strict=False)})
    # A table stays in memory by its path and size.
    dataset = written(tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet", table)
    samples = draw.integers(0, 7, 5).tolist()
    for one in (dataset, prepared(dataset)):
        found = batched(one, samples, size)
        for name in table.column_names:
            assert list(map(plain, found[name])) == expected(table[name], samples)
    assert Dataset.model_validate_json(dataset.model_dump_json()) == dataset


def test_padding_has_zeros_and_nothing(tmp_path: Path) -> None:
    table = pa.table({"x": [1.5], "a": pa.array([[1, 2]], pa.list_(pa.int8(), 2)), "b": [b"c"], "l": [[1]]})
    dataset = written(tmp_path / "a.parquet", table)
    found = batched(dataset, [-1, 0], 2)
    assert {name: list(map(plain, values)) for name, values in found.items()} == {
        "#sample": [-1, 0],
        "x": [0, 1.5],
        "a": [[0, 0], [1, 2]],
        "b": [b"", b"c"],
        "l": [[], [1]],
    }


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1], pa.timestamp("s")),
        pa.array([[[1]]]),
        pa.array([{"a": 1}]),
        pa.array([None], pa.null()),
        pa.array([1], pa.decimal128(5)),
    ],
)
def test_type_without_a_form_is_refused_by_name(tmp_path: Path, values: pa.Array) -> None:
    with pytest.raises(DataError, match=r"column 'x' has type .*; expected numbers, lists of numbers, arrays"):
        written(tmp_path / "a.parquet", pa.table({"x": values}))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, None]),
        pa.array([b"", None]),
        pa.array([[1], [None]]),
        pa.array([[1], None], pa.list_(pa.int8(), 1)),
    ],
)
def test_null_is_reported_with_its_row(tmp_path: Path, values: pa.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    path, table = tmp_path / "a.parquet", pa.table({"x": values})
    if not is_list(values.type):
        with pytest.raises(DataError, match=r"a.parquet: column 'x' has null in 1 rows of row group 0; fill them"):
            written(path, table)
    monkeypatch.setattr(pq, "write_table", partial(pq.write_table, write_statistics=False))
    dataset = written(path, table)
    source = [source_file(path)]
    for read in (
        lambda: read_rows(dataset, np.array([1])),
        lambda: prepared(dataset),
        lambda: first_rows(source, dataset.parts[0].own, 2),
    ):
        with pytest.raises(DataError, match=r"a.parquet, row 1 has null in column 'x'"):
            read()


def test_files_with_other_types_are_refused(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 1.5)):
        pq.write_table(pa.table({"x": [value]}), tmp_path / name)
    files = [source_file(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(DataError, match=r"column 'x' has one type in .*a and another in .*b"):
        own_columns(files, ["x"])
