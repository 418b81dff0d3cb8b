"""Functions of tests in fresh processes with a GPU, each with a process group of one rank."""

import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from train_loop.parallel.mesh import local_device


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `count` new processes at once; return the results. Both must pickle."""
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        calls = [pool.submit(_on_one_rank, function, arguments) for _ in range(count)]
        return [torch.load(io.BytesIO(call.result()), weights_only=False) for call in calls]


def _on_one_rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    local_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            # Tensors that a process sends otherwise are lost when it ends.
            torch.save(function(*arguments), result := io.BytesIO())
            return result.getvalue()
        finally:
            dist.destroy_process_group()
