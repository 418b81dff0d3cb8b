"""Ray Data's context for every execution, and whether the cluster has room for its tasks."""

import logging

from ray._private import state
from ray.data import DataContext


def ordered_context(*, block_bytes: int | None = None) -> DataContext:
    """The process's Ray Data context, set to keep order, to be quiet, and to raise what our functions raise.

    What a task yields is cut into blocks of `block_bytes`, or stays whole: a block that Ray Data cut in two would break
    the order in which blocks are dealt out.
    """
    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    # It would warn that they are off.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    context.print_on_execution_start = False
    context.target_max_block_size = block_bytes
    # What is wrong with somebody's data must arrive as what it is, and not as a function that failed.
    context.raise_original_map_exception = True
    return context


def has_whole_cpu() -> bool:
    """Return whether any node has a whole free CPU, as a task needs."""
    return any(amounts.get("CPU", 0.0) >= 1.0 for amounts in state.available_resources_per_node().values())
