"""Prepared samples → ranks, in order, exactly once, from any start: one Ray Data execution for all ranks.

Ray Data hands out blocks in the order of a plan when order is preserved, each to the split that has the fewest rows so
far. A plan of blocks of equal size, dealt to data ranks in turn, is therefore an ordered stream that can start
anywhere; every row carries its sample id and the loop checks it against the order, so that a change of that rule could
not go unnoticed.
"""

import functools
import itertools
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import ray
import torch.distributed as dist
from numpy.typing import NDArray
from ray.data import DataIterator, Datasource, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from train_loop import raylet
from train_loop.data.dataset import Rows
from train_loop.data.execution import ordered_context
from train_loop.data.read import read_rows
from train_loop.data.reader import StreamPlan, local_stream
from train_loop.plan import MeshPlan
from train_loop.spare import task_environment

T = TypeVar("T")
_FIRST_STEPS = 16
"""Steps whose rows the ranks read themselves in any case: a run of no more needs no Ray Data."""
_BLOCK_STEPS = 128
"""Steps in one block, at most: each block costs some 30 ms of Ray Data's, whatever is in it."""
_BLOCK_BYTES = 32 * 2**20
"""A block is no larger than this, unless a single step is."""
_BLOCKS_QUEUED = 4
"""Blocks of a data rank that may wait in the execution."""
BLOCKS_HELD = 8
"""Blocks of a data rank in memory, at most, with those on the way to it and in its hands: 256 MiB."""
_PLAN_BLOCKS = 512
"""Blocks per rank in one plan; a longer run is several plans, so that none grows with the run."""


def ray_stream(
    plan: StreamPlan, mesh: MeshPlan, rank: int, *, timeout: timedelta | None = None
) -> Iterator[Rows | None]:
    """This rank's rows of every step, `order.per_rank` of them; every rank must take every step.

    Only the first rank of a Ulysses group gets rows, its peers get None and then the rows from it. Ray Data takes
    seconds to start: until its rows have come, the ranks read theirs themselves. `timeout`: for collectives.
    """
    own = local_stream(plan, mesh, rank)
    head = min(plan.steps, _FIRST_STEPS)
    rest = replace(plan, start=plan.start + head * plan.order.global_batch, steps=plan.steps - head)
    if not rest.steps:
        yield from own
        return
    # A group of its own: its collectives run in a thread beside the loop's.
    rows = _streamed(rest, mesh, rank, dist.new_group(backend="gloo", timeout=timeout))
    first = _begin(rows)
    yield from itertools.islice(own, head)
    done = 0
    # Each rank for itself: which rows a step has does not depend on who reads them.
    while done < rest.steps and not first.done():
        yield next(own)
        done += 1
    if done < rest.steps:
        yield from itertools.islice(itertools.chain([first.result()], rows), done, None)


def _begin(rows: Iterator[T]) -> Future[T]:
    """The first of the rows, for which a thread waits already."""
    first: Future[T] = Future()

    def take() -> None:
        try:
            first.set_result(next(rows))
        except BaseException as error:
            # It is raised where they are taken.
            first.set_exception(error)

    threading.Thread(target=take, name="first-rows", daemon=True).start()
    return first


def _streamed(plan: StreamPlan, mesh: MeshPlan, rank: int, group: dist.ProcessGroup) -> Iterator[Rows | None]:
    """What Ray Data delivers."""
    leads = mesh.sequence_rank(rank) == 0
    done = 0
    while done < plan.steps:
        steps = min(plan.steps - done, _PLAN_BLOCKS * block_steps(plan))
        start = plan.start + done * plan.order.global_batch
        # Rank 0 starts the execution and tells the others.
        shared: list[Any] = [open_splits(plan, start, steps) if rank == 0 and raylet.has_whole_cpu() else None]
        dist.broadcast_object_list(shared, src=0, group=group)
        if shared[0] is None:
            # A task of Ray Data would never start.
            yield from local_stream(replace(plan, start=start, steps=plan.steps - done), mesh, rank)
            return
        split = shared[0][mesh.data_rank(rank)]
        rows = by_step(split, plan.order.per_rank) if leads else itertools.repeat(None)
        yield from itertools.islice(rows, steps)
        done += steps


def open_splits(plan: StreamPlan, start: int, steps: int) -> list[DataIterator]:
    """Start reading `steps` steps from a position: an iterator of blocks for each data rank, to be drained together."""
    # What the workers hold is taken; Ray Data would count it as its own and start tasks that never run.
    free = max(ray.available_resources().get("CPU", 0), 1)
    queued = _BLOCKS_QUEUED * plan.order.dp * block_bytes(plan)
    ordered_context().execution_options.resource_limits = ExecutionResources(cpu=free, object_store_memory=queued)
    blocks = math.ceil(steps / block_steps(plan)) * plan.order.dp
    environment = task_environment()
    numbers = ray.data.read_datasource(_Numbers(blocks), override_num_blocks=blocks, runtime_env=environment)
    data = numbers.map_batches(
        _read_block,
        batch_size=None,
        fn_kwargs={"plan": plan, "start": start, "steps": block_steps(plan)},
        runtime_env=environment,
    )
    splits: list[DataIterator] = data.streaming_split(plan.order.dp, equal=False)
    return splits


class _Numbers(Datasource):  # type: ignore[misc]
    """0, 1, 2 …, each a block of its own: `ray.data.range`, which takes no runtime environment."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """One for every number."""
        metadata = BlockMetadata(num_rows=1, size_bytes=8, input_files=None, exec_stats=None)
        return [ReadTask(functools.partial(_number, k), metadata) for k in range(self.count)]

    def estimate_inmemory_data_size(self) -> int:
        """In bytes."""
        return 8 * self.count


def _number(k: int) -> list[pa.Table]:
    return [pa.table({"id": [k]})]


def _read_block(batch: dict[str, NDArray[np.int64]], plan: StreamPlan, start: int, steps: int) -> pa.Table:
    """Block k holds the rows of data rank k mod dp for the k div dp-th run of so many steps."""
    (block,) = batch["id"]
    run, data_rank = divmod(int(block), plan.order.dp)
    first = start + run * steps * plan.order.global_batch
    ids = plan.order.rank_steps(first, steps, data_rank)
    return read_rows(plan.dataset, ids.reshape(-1)).to_arrow()


def block_steps(plan: StreamPlan) -> int:
    """Steps whose rows of one rank make up a block."""
    return max(1, min(_BLOCK_STEPS, plan.steps, _BLOCK_BYTES // _step_bytes(plan)))


def block_bytes(plan: StreamPlan) -> int:
    """Bytes of a block in the object store."""
    return block_steps(plan) * _step_bytes(plan)


def _step_bytes(plan: StreamPlan) -> int:
    """One rank's rows of a step: three int32 a token, and a float32 where they have weights."""
    return (16 if plan.dataset.weighted else 12) * plan.order.per_rank * plan.dataset.sequence_length


def by_step(split: DataIterator, per_rank: int) -> Iterator[Rows]:
    """The rows of one split, step by step."""
    for block in split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
        rows = Rows.from_arrow(block)
        for first in range(0, len(rows.samples), per_rank):
            yield rows.slice(first, first + per_rank)
