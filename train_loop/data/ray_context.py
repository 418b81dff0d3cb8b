"""The Ray of this process, its options for Ray Data, and the check for a free CPU."""

import atexit
import functools
import logging
import os
import secrets
from typing import Any

import pyarrow as pa
import ray
from ray._private import state
from ray.data import DataContext, Dataset, Datasource, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from train_loop.system.ray_env import OWN_RAY_VARIABLE


def configure_ray_data(*, block_bytes: int | None = None, limits: ExecutionResources | None = None) -> None:
    """Set the options of all datasets that this process creates from now on.

    They keep order, show no progress, and raise the original errors. `block_bytes`: size at which a task's output is
    cut into blocks. None keeps the output whole: if Ray Data split a block, the blocks would be dealt out in another
    order. `limits`: resources of one execution; None leaves them as they are.
    """
    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    if limits is not None:
        context.execution_options.resource_limits = limits
    context.enable_progress_bars = False
    # Suppress the warning that progress bars are off.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    context.print_on_execution_start = False
    context.target_max_block_size = block_bytes
    # A DataError must reach the driver as itself, not wrapped in an error of Ray Data.
    context.raise_original_map_exception = True


def numbers(count: int, **options: Any) -> Dataset:
    """Return the numbers 0, 1, 2 …, one block each, with Ray's options of the tasks that make them.

    Ray Data joins these tasks and those of a map with the same options; `ray.data.range` takes no options.
    """
    return ray.data.read_datasource(_Numbers(count), override_num_blocks=count, **options)


class _Numbers(Datasource):  # type: ignore[misc]
    """The numbers 0, 1, 2 …, one block each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """Return one task per number."""
        metadata = BlockMetadata(num_rows=1, size_bytes=8, input_files=None, exec_stats=None)
        return [ReadTask(functools.partial(_number, k), metadata) for k in range(self.count)]

    def estimate_inmemory_data_size(self) -> int:
        """Return the size of all numbers in bytes."""
        return 8 * self.count


def _number(k: int) -> list[pa.Table]:
    return [pa.table({"id": [k]})]


def has_whole_cpu() -> bool:
    """Return whether any node has a whole free CPU, as a task needs."""
    return any(amounts.get("CPU", 0.0) >= 1.0 for amounts in state.available_resources_per_node().values())


def start_ray() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one for the lifetime of this process.

    The command that starts one has set its variables before it imported Ray, which reads them then.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
        return
    folder = os.environ[OWN_RAY_VARIABLE]
    # A new token: without one, Ray would write one to ~/.ray/auth_token, which later clusters of the user would take.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    atexit.register(ray.shutdown)
    # "local": otherwise Ray joins the cluster that a file in /tmp/ray names, and any user can write that file.
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=logging.WARNING,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"{folder}/r",
    )
