"""The switch between a rank's own rows and those of Ray Data, on two ranks: every row once, whatever fails and when."""

import itertools
import random
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.support.builders.searches import seeds
from tests.support.builders.specs import spec
from tests.support.ranks.ranks import on_ranks
from tests.support.waiting import wait_for
from train_loop.data.dataset import Rows
from train_loop.data.order import Order, StepOrder
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream import takeover
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.plan import MeshPlan

STEPS, MESH, PAIRS = 12, MeshPlan(ddp=2, fsdp=1, sp=1), MeshPlan(ddp=2, fsdp=2, sp=2)
HANG = -1
"""In place of an error, the execution delivers nothing more."""


def plan_of(folder: Path, steps: int = STEPS) -> StreamPlan:
    job = spec(
        data={"train": {"path": f"{folder}/rows.parquet"}, "columns": {"input_ids": "ids"}}
        | {"packing": False, "sequence_length": 4}
    )
    order = StepOrder(Order(200, 0, shuffle=True, dataset="x", end=8 + steps * 4), 2, 2)
    return StreamPlan(find_dataset(job, folder), order, 8, steps)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"ids": [[i] * 4 for i in range(200)]}), tmp_path / "rows.parquet", row_group_size=16)
    return tmp_path


@dataclass(frozen=True)
class FakeSplit:
    """One data rank's part of an execution in this process, in place of Ray Data's."""

    plan: StreamPlan
    data_rank: int
    ended: Path
    """Exists once the execution has been ended by force."""
    fails_after: int | None
    """Number of steps that it delivers before its error."""
    hangs: bool

    def rows(self) -> Generator[Rows]:
        for step, rows in enumerate(local_stream(self.plan, MESH, self.data_rank)):
            while step == self.fails_after and self.hangs and not self.ended.exists():
                time.sleep(0.005)
            if step == self.fails_after or self.ended.exists():
                raise RuntimeError("the execution has ended")
            assert rows is not None
            yield rows


@dataclass(frozen=True)
class Faults:
    """Failures of the executions of a run."""

    starts: frozenset[int] = frozenset()
    """Numbers of the executions that do not start."""
    reads: tuple[tuple[int, int, int], ...] = ()
    """Execution, data rank, and the number of steps that it delivers to that rank."""
    hangs: bool = False


def take(folder: Path, faults: Faults, mesh: MeshPlan = MESH, blocks: int = 512) -> tuple[list[list[int]], int, int]:
    """Return this rank's samples of all steps, the executions that rank 0 started, and the failures reported."""
    count, reported = itertools.count(), list[str]()
    started = list[int]()

    def open_splits(plan: StreamPlan, start: int, steps: int) -> list[FakeSplit]:
        number = next(count)
        if number in faults.starts:
            raise OSError(f"execution {number} does not start")
        started.append(number)
        fails = {rank: after for execution, rank, after in faults.reads if execution == number}
        part = replace(plan, start=start, steps=steps)
        ended = folder / f"ended-{number}"
        return [FakeSplit(part, rank, ended, fails.get(rank), faults.hangs) for rank in range(plan.order.dp)]

    with (
        patch.object(takeover, "open_splits", open_splits),
        patch.object(takeover, "by_step", lambda split, per_rank: split.rows()),
        patch.object(takeover, "most_steps", lambda plan: min(plan.steps, blocks)),
        patch.object(takeover, "end_execution", lambda split: split.ended.touch()),
        patch.object(takeover, "has_whole_cpu", lambda: True),
        patch.object(takeover, "_ROWS_SECONDS", 0.3),
    ):
        report = lambda name, **_: reported.append(name)  # noqa: E731
        plan, received = plan_of(folder, 60), []
        for rows in takeover.ray_stream(plan, mesh, dist.get_rank(), after=0.01, report=report):
            received.append([] if rows is None else rows.samples.tolist())
            # A step of training: no rank is a step ahead of another.
            time.sleep(0.002)
            dist.barrier()
    return received, len(started), len(reported)


def expected(folder: Path, data_rank: int) -> list[list[int]]:
    plan = plan_of(folder, 60)
    return [plan.order.step(8 + step * 4)[data_rank].tolist() for step in range(60)]


def test_each_row_arrives_once_without_failures(folder: Path) -> None:
    for rank, (samples, started, failures) in enumerate(on_ranks(2, take, folder, Faults())):
        assert samples == expected(folder, rank)
        assert (started, failures) == (1 if rank == 0 else 0, 0)


def test_ranks_with_the_same_samples_get_none(folder: Path) -> None:
    faults = Faults(reads=((0, 1, 3),))
    for rank, (samples, _, failures) in enumerate(on_ranks(4, take, folder, faults, PAIRS)):
        assert samples == ([[]] * 60 if rank % 2 else expected(folder, rank // 2))
        assert failures == (0 if rank % 2 else 1)


def test_next_execution_follows_without_a_wait(folder: Path) -> None:
    for rank, (samples, started, failures) in enumerate(on_ranks(2, take, folder, Faults(), MESH, 7)):
        assert samples == expected(folder, rank)
        assert failures == 0
        assert rank == 1 or started > 2


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("rank_that_fails", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 20])
def test_failure_on_one_rank_costs_no_row_and_ray_data_starts_again(
    folder: Path, rank_that_fails: int, after: int, hangs: bool
) -> None:
    faults = Faults(reads=((0, rank_that_fails, after),), hangs=hangs)
    for rank, (samples, started, failures) in enumerate(on_ranks(2, take, folder, faults)):
        assert samples == expected(folder, rank)
        # No rank waits for an execution that delivers nothing in time.
        assert failures == 1 or (hangs and failures == 0), "expected a failure on both ranks"
        assert rank == 1 or started == 1 + failures


def test_execution_that_starts_late_catches_up_without_a_wait(folder: Path) -> None:
    """The thread leaves out the rows that the rank has read meanwhile."""
    plan, taken = plan_of(folder, 60), 40
    one = takeover.Takeover(plan, 0, None, done=0)  # type: ignore[arg-type]
    one.taken = taken
    with patch.object(takeover, "by_step", lambda split, per_rank: split.rows()):
        threading.Thread(target=one._read, args=(FakeSplit(plan, 0, folder / "ended", None, False), 0)).start()
        wait_for(lambda: one.is_due(taken), "rows of the step that is due")
        assert one._first == taken
        assert next(one.rows(taken)).samples.tolist() == expected(folder, 0)[taken]
        one.close()


def test_run_whose_executions_never_start_reads_its_own_rows(folder: Path) -> None:
    for rank, (samples, started, failures) in enumerate(on_ranks(2, take, folder, Faults(frozenset(range(99))))):
        assert samples == expected(folder, rank)
        assert started == 0
        assert 1 <= failures <= takeover._MOST_FAILURES


@pytest.mark.parametrize("seed", range(seeds(4, more=100)))
def test_random_failures_cost_no_row(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    reads = tuple((draw.randrange(6), draw.randrange(2), draw.randrange(12)) for _ in range(draw.randrange(1, 7)))
    starts = frozenset(draw.sample(range(8), draw.randrange(4)))
    faults, blocks = Faults(starts, reads, draw.random() < 0.3), draw.choice([5, 11, 512])
    for rank, (samples, *_) in enumerate(on_ranks(2, take, folder, faults, MESH, blocks)):
        assert samples == expected(folder, rank), (seed, faults)


def take_apart(folder: Path, before: tuple[int, int]) -> tuple[list[list[int]], list[int]]:
    """Return the samples of all steps, and the starts of the executions."""
    rank, began = dist.get_rank(), list[int]()
    takeovers, begin = list[takeover.Takeover](), takeover.Takeover.begin

    def open_splits(plan: StreamPlan, start: int, steps: int) -> list[FakeSplit]:
        began.append(start)
        return [FakeSplit(plan, rank, folder / "ended", None, False) for rank in range(2)]

    with (
        patch.object(takeover, "open_splits", open_splits),
        patch.object(takeover, "by_step", lambda split, per_rank: split.rows()),
        patch.object(takeover, "has_whole_cpu", lambda: True),
        patch.object(takeover.Takeover, "begin", lambda one, after: takeovers.append(one)),
    ):
        rows = takeover.ray_stream(plan_of(folder), MESH, rank)
        # A step counts as taken once the next one is requested.
        received = [next(rows) for _ in range(before[rank] + 1)]
        dist.barrier()
        begin(takeovers[0], 0.0)
        wait_for(lambda: takeovers[0]._first is not None or not _reads(), "the first rows")
        received += rows
    return [one.samples.tolist() for one in received if one is not None], began


@pytest.mark.parametrize("before", [(3, 3), (3, 2), (3, 5), (0, 1), (1, 0), (11, 10)])
def test_ranks_at_different_steps_get_each_row_once(folder: Path, before: tuple[int, int]) -> None:
    plan = plan_of(folder)
    for rank, (samples, began) in enumerate(on_ranks(2, take_apart, folder, before)):
        assert samples == [plan.order.step(8 + step * 4)[rank].tolist() for step in range(STEPS)]
        assert began == ([8 + before[0] * 4] if rank == 0 else []), "expected the step of the first rank"


def _reads() -> bool:
    """Return whether a thread reads rows of Ray Data, or waits for their start."""
    return "ray-rows" in {thread.name for thread in threading.enumerate()}
