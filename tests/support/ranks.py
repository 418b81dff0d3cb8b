"""Run a function on real gloo ranks, each a process of its own."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank of a gloo group; what each rank returned, by rank.

    The function must be importable, and what it returns must pickle. Raises what the first failing rank raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (world, folder, function, arguments), nprocs=world)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        torch.save(function(*arguments), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()
