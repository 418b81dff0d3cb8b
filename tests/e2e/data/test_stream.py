"""Streaming on real Ray: every rank gets its samples once, in order, from any start, with little read amplification."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.support.builders.specs import spec
from tests.support.ranks.own_ray import own_ray
from tests.support.waiting import wait_for
from train_loop.data.dataset import Dataset, Rows
from train_loop.data.order import Order, StepOrder
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.pipeline import prepare
from train_loop.data.stream import ray_data, takeover
from train_loop.data.stream.local import StreamPlan, read_rows
from train_loop.data.stream.ray_data import by_step, open_splits
from train_loop.data.stream.takeover import ray_stream
from train_loop.plan import MeshPlan
from train_loop.spec import JobSpec


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray(store_bytes=100_000_000):
        yield


def tokens_spec(path: Path, **data: Any) -> JobSpec:
    return spec(data={"train": {"path": str(path)}, "columns": {"input_ids": "ids"}} | data)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return 200 samples; sample i contains the number i."""
    path = tmp_path_factory.mktemp("numbered") / "rows.parquet"
    pq.write_table(pa.table({"ids": [[i] * 4 for i in range(200)]}), path, row_group_size=16)
    return find_dataset(tokens_spec(path, packing=False, sequence_length=4), path.parent)


@pytest.mark.parametrize(
    ("dp", "start", "steps", "dealt"),
    [
        (1, 0, 30, {}),
        (2, 0, 30, {}),
        (2, 104, 20, {}),
        (3, 12, 33, {}),
        (4, 0, 19, {}),
        # As a run with `reproducible: any_size` deals them.
        (2, 12, 30, {"micro_batch": 1}),
        (4, 0, 19, {"micro_batch": 1, "replicas": 2}),
    ],
)
def test_every_rank_gets_exactly_its_samples_in_order_from_any_start(
    numbered: Dataset, dp: int, start: int, steps: int, dealt: dict[str, int]
) -> None:
    per_rank = 12 // dp
    deal = StepOrder(Order(200, 0, shuffle=True, dataset="x", end=start + steps * 12 - 5), dp, per_rank, **dealt)
    splits = open_splits(StreamPlan(numbered, deal, start, steps), start, steps)

    def drain(rank: int) -> list[Rows]:
        return list(by_step(splits[rank], per_rank))[:steps]

    with ThreadPoolExecutor(dp) as pool:
        streams = list(pool.map(drain, range(dp)))
    for rank, received in enumerate(streams):
        assert len(received) == steps
        for step, rows in enumerate(received):
            expected = deal.step(start + step * 12)[rank]
            assert rows.samples.tolist() == expected.tolist()
            real = expected >= 0
            assert rows.input_ids[real, 0].tolist() == expected[real].tolist()
            assert rows.lengths.tolist() == np.where(real, 4, 0).tolist()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Start a process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ALONE = MeshPlan(ddp=1, fsdp=1, sp=1)


def stream_of(numbered: Dataset, steps: int, **options: Any) -> tuple[Iterator[Rows | None], list[list[int]]]:
    """Return the stream of a single rank, and the samples of each step."""
    deal = StepOrder(Order(200, 0, shuffle=True, dataset="x", end=8 + steps * 4), 1, 4)
    rows = ray_stream(StreamPlan(numbered, deal, 8, steps), ALONE, 0, **options)
    return rows, [deal.step(8 + step * 4)[0].tolist() for step in range(steps)]


def samples_of(rows: Iterable[Rows | None]) -> list[list[int]]:
    return [one.samples.tolist() for one in rows if one is not None]


def has_reader_thread() -> bool:
    """Return whether a thread starts Ray Data or reads its rows."""
    return any(thread.name == "ray-rows" for thread in threading.enumerate())


def test_short_run_starts_no_ray_data(numbered: Dataset, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "open_splits", lambda *_: pytest.fail("Ray Data was started"))
    rows, expected = stream_of(numbered, 40)
    assert samples_of(rows) == expected
    wait_for(lambda: not has_reader_thread(), "the end of the waiting thread", seconds=takeover._WORTH_IT / 2)


def test_rank_reads_its_own_rows_until_ray_data_delivers(
    numbered: Dataset, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = list[int]()

    def read_here(dataset: Dataset, ids: Any) -> Rows:
        own.extend(ids.tolist())
        return read_rows(dataset, ids)

    monkeypatch.setattr("train_loop.data.stream.local.read_rows", read_here)
    rows, expected = stream_of(numbered, 40, after=0.0)
    received = [next(rows)]

    def delivers() -> bool:
        """Take a step, and return whether Ray Data has delivered its rows."""
        before = len(own)
        received.append(next(rows))
        return len(own) == before

    wait_for(delivers, "rows of Ray Data", pause=3.0)
    read = len(own)
    received += rows
    assert samples_of(received) == expected
    assert len(own) == read, "expected no own rows after the first of Ray Data"


def test_all_ranks_together_have_little_read_amplification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the read amplification: at most 1.2 bytes read by Data workers per byte of the samples."""
    length, count, read_block = 4096, 512, ray_data._read_block
    table = pa.table({"ids": [np.full(length, i % 300, np.int32) for i in range(count)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = tokens_spec(tmp_path / "rows.parquet", sequence_length=length)
    dataset = prepare(rows, tmp_path / "_cache", lambda *_, **__: None)

    def bytes_read() -> int:
        (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
        return int(line.split()[1])

    def counting(batch: Any, **where: Any) -> pa.Table:
        before = bytes_read()
        block = read_block(batch, **where)
        (tmp_path / f"block-{batch['id'][0]}").write_text(str(bytes_read() - before))
        return block

    monkeypatch.setattr(ray_data, "_read_block", counting)
    plan = StreamPlan(dataset, StepOrder(Order(count, 0, True, "x", end=count // 2), dp=2, per_rank=4), 0, count // 16)
    splits = open_splits(plan, 0, plan.steps)
    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(lambda split: sum(len(rows.samples) for rows in by_step(split, 4)), splits))
    assert sum(taken) == count // 2
    own = count // 2 * length * 4
    read = sum(int(path.read_text()) for path in tmp_path.glob("block-*"))
    assert own <= read <= 1.2 * own
