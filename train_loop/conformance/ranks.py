"""Functions on real gloo ranks of this machine, each in a separate process."""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from train_loop.errors import UserError
from train_loop.system.exit import leave

PRELOAD = ("train_loop.conformance.probes", "pandas")
"""Modules that ranks import before they are forked, because their import is slow."""


class RanksFailed(UserError):
    """An error of some rank; its message is that of a user's error if one of the ranks had one."""


def call_on_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Call `function(*arguments)` on every rank of a new gloo group; return the result of rank 0. Raises RanksFailed.

    The function must be importable, and its result must pickle. The ranks have further environment variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **(environment or {})}
        ranks = start_ranks(_rank, world, (variables, world, folder, function, arguments), preload=PRELOAD)
        try:
            join_ranks(ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RanksFailed(_message(Path(folder), error)) from error
        return torch.load(Path(folder, "0.pt"), weights_only=False)


def start_ranks(
    function: Callable[..., None], world: int, arguments: tuple[Any, ...], *, preload: Sequence[str]
) -> Any:
    """Fork processes that call `function(rank, *arguments)` from a process that has already imported some modules."""
    set_forkserver_preload([*preload])
    return start_processes(function, arguments, nprocs=world, join=False, start_method="forkserver")  # type: ignore[no-untyped-call]


def join_ranks(ranks: Any) -> None:
    """Wait for ranks to end. Raises the exception of the first that fails, after it has ended the others."""
    while not ranks.join():
        pass


@contextmanager
def rank_group(
    rank: int, environment: dict[str, str], world: int, folder: str, backend: str = "gloo"
) -> Iterator[None]:
    """Join a process group that meets in a folder, for the duration of the context."""
    # The process that it was forked from has the environment and the temporary folder of an earlier time.
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(
    rank: int,
    environment: dict[str, str],
    world: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    with rank_group(rank, environment, world, folder):
        try:
            found = function(*arguments)
        except UserError as error:
            Path(folder, f"{rank}.error").write_text(str(error))
            raise
        if rank == 0:
            torch.save(found, Path(folder, "0.pt"))
    leave()


def _message(folder: Path, error: Exception) -> str:
    """Return the message of a user's error, which other errors follow; otherwise the error's last line."""
    told = [file.read_text() for file in sorted(folder.glob("*.error"))]
    if told:
        return told[0]
    last = [line for line in str(error).splitlines() if line.strip()] or [traceback.format_exception_only(error)[-1]]
    return f"a rank failed: {last[-1].strip()}"
