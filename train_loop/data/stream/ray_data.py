"""Prepared samples → ranks, in order, exactly once, from any position: one Ray Data execution for all ranks.

If order is preserved, Ray Data deals out blocks in the order of a plan, each to the split with the fewest rows so far.
A plan of equal blocks, assigned to data ranks in turn, is thus an ordered stream that can start anywhere. Every row
carries its sample id, and the loop checks the id against the order: a change of Ray Data's rule is noticed.
"""

import itertools
import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch.distributed as dist
from numpy.typing import NDArray
from ray.data import DataIterator, ExecutionResources
from ray.exceptions import ActorUnschedulableError

from train_loop.data.dataset import Rows
from train_loop.data.ray_context import configure_ray_data, has_whole_cpu, numbers
from train_loop.data.stream.local import StreamPlan, local_stream, read_rows
from train_loop.plan import MeshPlan
from train_loop.system.ray_env import task_environment

log = logging.getLogger(__name__)

_WORTH_IT = 10.0
"""Seconds before Ray Data starts. Its processes take 8 CPU seconds to start; a short run avoids this cost."""
_BLOCK_STEPS = 128
"""Maximum steps per block; each block costs Ray Data some 30 ms, whatever its size."""
_BLOCK_BYTES = 32 * 2**20
"""Maximum size of a block in bytes, unless a single step is larger."""
_BLOCKS_QUEUED = 4
"""Maximum blocks of a data rank that wait in the execution."""
BLOCKS_HELD = 8
"""Maximum blocks of a data rank in memory, including blocks in transfer and in use: 256 MiB."""
_PLAN_BLOCKS = 512
"""Blocks per rank in one plan; a longer run has several plans, so that no plan grows with the run."""


def ray_stream(
    plan: StreamPlan, mesh: MeshPlan, rank: int, *, timeout: timedelta | None = None, after: float = _WORTH_IT
) -> Iterator[Rows | None]:
    """Yield this rank's rows of every step, `order.per_rank` of them; every rank must take every step.

    Only the first of the ranks with the same samples gets rows; its peers get None, and receive its rows. Ray Data
    starts after `after` seconds. The ranks read their own rows until it delivers, and to the end if it cannot start.
    `timeout`: timeout of collectives.
    """
    own, done = local_stream(plan, mesh, rank), 0
    # A separate process group: its collectives run in a thread, concurrently with those of the loop.
    takeover = _Takeover(plan, mesh, rank, dist.new_group(backend="gloo", timeout=timeout))
    takeover.begin(after)
    try:
        # Each rank switches independently: the rows of a step do not depend on their reader.
        while done < plan.steps and not takeover.is_ready(done):
            yield next(own)
            done += 1
            takeover.taken = done
    finally:
        takeover.cancel()
    if done < plan.steps:
        yield from takeover.rows(done)


class _Takeover:
    """The start of Ray Data in a thread, and the switch from a rank's own rows to those of Ray Data."""

    def __init__(self, plan: StreamPlan, mesh: MeshPlan, rank: int, group: dist.ProcessGroup) -> None:
        self._plan, self._mesh, self._rank, self._group = plan, mesh, rank, group
        self._first: Future[tuple[int, Iterator[Rows | None]]] = Future()
        """First step that Ray Data delivers, and the rows from that step on; set when the first rows have arrived."""
        self._cancelled = threading.Event()
        self.taken = 0
        """Number of steps whose rows this rank has read itself."""

    def begin(self, after: float) -> None:
        """Start Ray Data in a thread after `after` seconds, unless it is cancelled before. Returns at once."""
        threading.Thread(target=self._start, args=(after,), name="first-rows", daemon=True).start()

    def cancel(self) -> None:
        """Prevent the start of Ray Data, unless it has begun."""
        self._cancelled.set()

    def is_ready(self, done: int) -> bool:
        """Return whether Ray Data delivers the rows after the first `done` steps. True if it failed."""
        return self._first.done() and (self._first.exception() is not None or self._first.result()[0] <= done)

    def rows(self, done: int) -> Iterator[Rows | None]:
        """Return the rows after the first `done` steps. Raises the error that the start of Ray Data has raised."""
        first, rows = self._first.result()
        return itertools.islice(rows, done - first, None)

    def _start(self, after: float) -> None:
        # Every rank waits: a collective that only some ranks have entered might time out.
        if self._cancelled.wait(after):
            return
        try:
            shared: list[Any] = [self.taken]
            dist.broadcast_object_list(shared, src=0, group=self._group)
            first: int = shared[0]
            plan = self._plan
            rest = replace(plan, start=plan.start + first * plan.order.global_batch, steps=plan.steps - first)
            if rest.steps:
                rows = _streamed(rest, self._mesh, self._rank, self._group)
                self._first.set_result((first, itertools.chain([next(rows)], rows)))
        except ActorUnschedulableError as error:
            # All ranks get this error. A node that is draining accepts no new actors, but the run continues.
            log.warning("Ray Data cannot start; the ranks read their rows themselves: %s", error)
        except BaseException as error:
            # `rows` raises the error.
            self._first.set_exception(error)


def _streamed(plan: StreamPlan, mesh: MeshPlan, rank: int, group: dist.ProcessGroup) -> Iterator[Rows | None]:
    """Yield the rows that Ray Data delivers."""
    leads = mesh.leads(rank)
    done = 0
    while done < plan.steps:
        steps = min(plan.steps - done, _PLAN_BLOCKS * block_steps(plan))
        start = plan.start + done * plan.order.global_batch
        # Rank 0 starts the execution and broadcasts its splits.
        shared: list[Any] = [open_splits(plan, start, steps) if rank == 0 and has_whole_cpu() else None]
        dist.broadcast_object_list(shared, src=0, group=group)
        if shared[0] is None:
            # Without a free CPU, a task of Ray Data would never start.
            yield from local_stream(replace(plan, start=start, steps=plan.steps - done), mesh, rank)
            return
        split = shared[0][mesh.data_rank(rank)]
        rows = by_step(split, plan.order.per_rank) if leads else itertools.repeat(None)
        yield from itertools.islice(rows, steps)
        done += steps


def open_splits(plan: StreamPlan, start: int, steps: int) -> list[DataIterator]:
    """Start reading `steps` steps from a position. Return one iterator of blocks per data rank; drain them together."""
    # Exclude the CPUs of the workers: Ray Data would count them as its own and start tasks that never run.
    free = max(ray.available_resources().get("CPU", 0), 1)
    queued = _BLOCKS_QUEUED * plan.order.dp * block_bytes(plan)
    configure_ray_data(limits=ExecutionResources(cpu=free, object_store_memory=queued))
    blocks = math.ceil(steps / block_steps(plan)) * plan.order.dp
    environment = task_environment()
    data = numbers(blocks, runtime_env=environment).map_batches(
        _read_block,
        batch_size=None,
        fn_kwargs={"plan": plan, "start": start, "steps": block_steps(plan)},
        runtime_env=environment,
    )
    splits: list[DataIterator] = data.streaming_split(plan.order.dp, equal=False)
    return splits


def _read_block(batch: dict[str, NDArray[np.int64]], plan: StreamPlan, start: int, steps: int) -> pa.Table:
    """Return block k: the rows of data rank k mod dp for the (k div dp)-th run of `steps` steps."""
    (block,) = batch["id"]
    run, data_rank = divmod(int(block), plan.order.dp)
    first = start + run * steps * plan.order.global_batch
    ids = plan.order.rank_steps(first, steps, data_rank)
    return read_rows(plan.dataset, ids.reshape(-1)).to_arrow()


def block_steps(plan: StreamPlan) -> int:
    """Return the number of steps per block."""
    return max(1, min(_BLOCK_STEPS, plan.steps, _BLOCK_BYTES // _step_bytes(plan)))


def block_bytes(plan: StreamPlan) -> int:
    """Return the size of a block in the object store, in bytes."""
    return block_steps(plan) * _step_bytes(plan)


def _step_bytes(plan: StreamPlan) -> int:
    """Return the bytes of one rank's rows of a step."""
    return plan.dataset.row_bytes * plan.order.per_rank


def by_step(split: DataIterator, per_rank: int) -> Iterator[Rows]:
    """Yield the rows of one split, step by step."""
    for block in split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
        rows = Rows.from_arrow(block)
        for first in range(0, len(rows.samples), per_rank):
            yield rows.slice(first, first + per_rank)
