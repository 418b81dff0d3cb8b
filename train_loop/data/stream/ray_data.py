"""Prepared samples → ranks, in order, exactly once, from any position: one execution of Ray Data for all ranks.

If order is preserved, Ray Data deals out blocks in the order of a plan, each to the split with the fewest rows so far.
A plan of equal blocks, assigned to data ranks in turn, is thus an ordered stream that can start anywhere. Every row
carries its sample id, and the loop checks the id against the order: a change of Ray Data's rule is noticed.
"""

import math
from collections.abc import Generator
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray.data import DataIterator, ExecutionResources
from ray.data._internal.iterator.stream_split_iterator import SplitCoordinator
from ray.runtime_env import RuntimeEnv

from train_loop.data.dataset import Rows
from train_loop.data.ray_context import configure_ray_data, numbers
from train_loop.data.stream.local import StreamPlan, read_rows
from train_loop.system.ray_env import Environment, task_environment

_BLOCK_STEPS = 128
"""Maximum steps per block; each block costs Ray Data some 30 ms, whatever its size."""
_BLOCK_BYTES = 32 * 2**20
"""Maximum size of a block in bytes, unless a single step is larger."""
_BLOCKS_QUEUED = 4
"""Maximum blocks of a data rank that wait in the execution."""
BLOCKS_HELD = 8
"""Maximum blocks of a data rank in memory, including blocks in transfer and in use: 256 MiB."""
_MOST_BLOCKS = 512
"""Blocks per rank in one execution; a longer run has several, so that none grows with the run."""

Split: TypeAlias = DataIterator
"""Blocks of an execution for one data rank."""


def open_splits(plan: StreamPlan, start: int, steps: int) -> list[Split]:
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
    _set_environment_of_coordinator(environment)
    splits: list[Split] = data.streaming_split(plan.order.dp, equal=False)
    return splits


def most_steps(plan: StreamPlan) -> int:
    """Return the maximum number of steps of one execution."""
    return min(plan.steps, _MOST_BLOCKS * block_steps(plan))


def end_execution(split: Split) -> None:
    """End the execution of a split for all ranks, by force: they then get an error in place of rows."""
    ray.kill(split._coord_actor)


def _set_environment_of_coordinator(environment: Environment | None) -> None:
    """Start the actor that deals out blocks in the environment of tasks: it would inherit that of spare workers."""
    if environment is not None:
        SplitCoordinator._default_options["runtime_env"] = RuntimeEnv(**environment)


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


def by_step(split: Split, per_rank: int) -> Generator[Rows]:
    """Yield the rows of one split, step by step."""
    for block in split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
        rows = Rows.from_arrow(block)
        for first in range(0, len(rows.samples), per_rank):
            yield rows.slice(first, first + per_rank)
