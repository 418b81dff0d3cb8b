"""The first step for which Ray Data delivers rows, if ranks are at different steps."""

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.support.builders.specs import spec
from tests.support.ranks.ranks import on_ranks
from tests.support.waiting import wait_for
from train_loop.data.dataset import Rows
from train_loop.data.order import Order, StepOrder
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream import ray_data
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.plan import MeshPlan

STEPS, MESH = 12, MeshPlan(ddp=2, fsdp=1, sp=1)


def plan_of(folder: Path) -> StreamPlan:
    job = spec(
        data={"train": {"path": f"{folder}/rows.parquet"}, "columns": {"input_ids": "ids"}}
        | {"packing": False, "sequence_length": 4}
    )
    order = StepOrder(Order(200, 0, shuffle=True, dataset="x", end=8 + STEPS * 4), 2, 2)
    return StreamPlan(find_dataset(job, folder), order, 8, STEPS)


def take(folder: Path, before: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """Return the samples of all steps, and the start of Ray Data after each rank took its number of steps."""
    rank, began = dist.get_rank(), list[int]()

    def streamed(plan: StreamPlan, mesh: MeshPlan, rank: int, group: dist.ProcessGroup) -> Iterator[Rows | None]:
        began.append(plan.start)
        return local_stream(plan, mesh, rank)

    takeovers, begin = list[ray_data._Takeover](), ray_data._Takeover.begin
    with (
        patch.object(ray_data, "_streamed", streamed),
        patch.object(ray_data._Takeover, "begin", lambda takeover, after: takeovers.append(takeover)),
    ):
        rows = ray_data.ray_stream(plan_of(folder), MESH, rank)
        # A step counts as taken once the next one is requested.
        received = [next(rows) for _ in range(before[rank] + 1)]
        dist.barrier()
        begin(takeovers[0], after=0.0)
        wait_for(lambda: not any(one.name == "first-rows" for one in threading.enumerate()), "the first rows")
        received += rows
    return [one.samples.tolist() for one in received if one is not None], began


@pytest.mark.parametrize("before", [(3, 3), (3, 2), (3, 5), (0, 1), (1, 0), (11, 10)])
def test_ranks_at_different_steps_get_each_row_once(tmp_path: Path, before: tuple[int, int]) -> None:
    pq.write_table(pa.table({"ids": [[i] * 4 for i in range(200)]}), tmp_path / "rows.parquet", row_group_size=16)
    plan = plan_of(tmp_path)
    for rank, (samples, began) in enumerate(on_ranks(2, take, tmp_path, before)):
        assert samples == [plan.order.step(8 + step * 4)[rank].tolist() for step in range(STEPS)]
        assert began == [8 + before[0] * 4], "expected the step of the coordinator's rank"
