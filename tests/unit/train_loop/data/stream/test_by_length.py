"""The order of inference: each window has the rows of a shard, by length."""

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.builders.datasets import parquet_dataset
from train_loop.data import shards
from train_loop.data.dataset import Dataset
from train_loop.data.order import PADDING, StepOrder
from train_loop.data.prepare.packing import Sample
from train_loop.data.shards import write_part
from train_loop.data.stream.by_length import LengthOrder
from train_loop.data.stream.local import row_lengths

LENGTH = 30
lists = st.lists(st.lists(st.integers(0, LENGTH), min_size=1, max_size=12), min_size=1, max_size=3)


def in_files(sizes: Sequence[Sequence[int]], folder: Path) -> Dataset:
    """Return a dataset of files with rows of these lengths, which are read without preparation."""
    paths = []
    for number, lengths in enumerate(sizes):
        paths.append(folder / f"{number}.parquet")
        pq.write_table(pa.table({"input_ids": pa.array([[7] * n for n in lengths], pa.list_(pa.int32()))}), paths[-1])
    return parquet_dataset(*paths, length=LENGTH)


def prepared(sizes: Sequence[Sequence[int]], folder: Path) -> Dataset:
    """Return a dataset of prepared samples, in a part per list."""
    parts = []
    for number, lengths in enumerate(sizes):
        (place := folder / str(number)).mkdir()
        samples = [Sample(np.arange(n, dtype=np.int32), None, None, [n]) for n in lengths]
        parts.append(write_part(samples, place))
    return Dataset(fingerprint="x", parts=tuple(parts), sequence_length=LENGTH)


def order(dataset: Dataset, window: int) -> LengthOrder:
    count = dataset.samples
    return LengthOrder(count, seed=0, shuffle=False, dataset="x", end=count, rows=dataset, window=window)


@given(sizes=lists, window=st.integers(1, 20), dp=st.integers(1, 3), per_rank=st.integers(1, 4), made=st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_window_has_the_rows_of_its_shard_by_length(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    window: int,
    dp: int,
    per_rank: int,
    made: bool,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    dataset = prepared(sizes, folder) if made else in_files(sizes, folder)
    lengths = [n for of_part in sizes for n in of_part]
    assert row_lengths(dataset, 0, len(lengths)).tolist() == lengths
    one = order(dataset, window)
    found = one.at(np.arange(len(lengths) + 2)).tolist()
    assert found[len(lengths) :] == [PADDING, PADDING]
    for number, first in enumerate(range(0, len(lengths), window)):
        stop = min(first + window, len(lengths))
        assert sorted(found[first:stop]) == list(range(first, stop))
        mine = [lengths[row] for row in found[first:stop]]
        assert mine == sorted(mine, reverse=number % 2 == 0)
    dealt = StepOrder(pickle.loads(pickle.dumps(one)), dp, per_rank)
    for start in range(0, len(lengths), window):
        rows = [row for step in range(dealt.steps_left(start)) for row in dealt.step(start + step * dp * per_rank).flat]
        assert [row for row in rows if row != PADDING] == found[start : len(lengths)]


def test_lengths_are_read_again_after_storage_was_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = prepared([[3, 9, 1]], tmp_path)
    read, fails = shards._Opened.read, iter([True, True])

    def read_later(file: shards._Opened, count: int, place: int) -> bytes:
        if next(fails, False):
            raise OSError(116, "Stale file handle")
        return read(file, count, place)

    monkeypatch.setattr(shards._Opened, "read", read_later)
    assert row_lengths(dataset, 1, 3).tolist() == [9, 1]
