"""Prepared shards: reads from any index, and their read amplification."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from train_loop.data import shards
from train_loop.data.dataset import Cells
from train_loop.data.prepare.packing import Sample
from train_loop.data.shards import read_shards, write_part


def a_sample(number: int, documents: Sequence[int], *, full: bool) -> Sample:
    """Return a sample whose tokens, labels and weights differ from those of every other."""
    ids = np.arange(sum(documents), dtype=np.int32) + 1000 * number
    weights = np.arange(len(documents), dtype=np.float32) + number / 4
    return Sample(ids, -ids if full else None, weights if full else None, list(documents))


def assert_same(cells: Cells, sample: Sample) -> None:
    expected = {name: np.asarray(values).tolist() for name, values in vars(sample).items() if values is not None}
    assert {name: values.tolist() for name, values in cells.items()} == expected


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=30),
    full=st.booleans(),
    data=st.data(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sample_is_read_from_any_shard(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], full: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    samples = [a_sample(number, documents, full=full) for number, documents in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_SHARD_TOKENS", (10, 50))
        part = write_part(samples, folder)
    assert part.samples == len(samples)
    assert part.tokens == sum(map(sum, sizes))
    indices = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=10))
    for cells, sample in zip(read_shards(part, np.array(indices, np.int64)), indices, strict=True):
        assert_same(cells, samples[sample])


def test_digest_depends_on_every_value_and_not_on_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*samples: Sample) -> str | None:
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        return write_part(samples, folder).digest

    one, two = a_sample(1, [3, 2], full=True), a_sample(2, [4], full=True)
    others = [replace(one, **{name: getattr(one, name) + 1}) for name in ("input_ids", "labels", "weights")] + [
        replace(one, documents=[2, 3])
    ]
    assert len({digest(one, two), digest(two, one), digest(one), *(digest(other, two) for other in others)}) == 7
    whole = digest(one, two)
    monkeypatch.setattr(shards, "_SHARD_TOKENS", (1, 1))
    assert digest(one, two) == whole


def test_shards_are_readable_as_parquet(tmp_path: Path) -> None:
    write_part([a_sample(n, [3, n + 1], full=True) for n in range(5)], tmp_path)
    table = pq.read_table(tmp_path / "part-00000.parquet")
    assert table["documents"].to_pylist() == [[3, n + 1] for n in range(5)]
    assert table["input_ids"][2].as_py() == list(range(2000, 2006))


def test_shuffled_read_has_little_amplification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the read amplification: at most 1.2 bytes read from files per byte of the requested samples."""
    samples = [a_sample(n, [50, 78], full=False) for n in range(4000)]
    part = write_part(samples, tmp_path)
    read: list[int] = []
    pread = os.pread

    def counting(descriptor: int, count: int, place: int) -> bytes:
        read.append(count)
        return pread(descriptor, count, place)

    monkeypatch.setattr(os, "pread", counting)
    indices = np.random.default_rng(0).permutation(4000)[:300]
    own = sum(cells["input_ids"].nbytes for cells in read_shards(part, indices))
    assert sum(read) <= 1.2 * own
