"""Run functions on real gloo ranks, each in a separate process."""

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.multiprocessing import Queue, get_context

from train_loop.conformance.ranks import join_ranks, rank_group, start_ranks
from train_loop.system.exit import leave


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank of a gloo group; return the results by rank.

    The function must be importable, and its result must pickle. Raises the exception of the first failing rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(_start(_rank, world, (dict(os.environ), world, folder, function, arguments)))
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


@contextmanager
def ranks_that_stay(world: int) -> Iterator[Callable[..., Any]]:
    """Start ranks for many calls, for tests that draw their cases. Yields a function that returns rank 0's result."""
    context = get_context("forkserver")
    requests, answers = [context.Queue() for _ in range(world)], context.Queue()

    def call_ranks(function: Callable[..., Any], *arguments: Any) -> Any:
        for queue in requests:
            queue.put((function, arguments))
        error, answer = _next_answer(answers, ranks)
        if error:
            raise AssertionError(error)
        return answer

    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(_answer, world, (dict(os.environ), world, folder, requests, answers))
        yield call_ranks
        for queue in requests:
            queue.put(None)
        join_ranks(ranks)


@contextmanager
def ranks_of_any_number(most: int, *, backend: str = "gloo") -> Iterator[Callable[..., Any]]:
    """Start ranks for many calls, for tests that change the number of ranks often.

    Yields `call_ranks(world, function, *arguments)`. It runs the function on the first `world` ranks, in a new group,
    and returns rank 0's result.
    """
    context = get_context("forkserver")
    requests, answers = [context.Queue() for _ in range(most)], context.Queue()

    def call_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
        with tempfile.TemporaryDirectory() as group:
            for queue in requests[:world]:
                queue.put((world, group, function, arguments))
            found = [_next_answer(answers, ranks) for _ in range(world)]
        # The error of one rank is often that another one has failed.
        if errors := [f"rank {rank}: {error}" for rank, error, _ in found if error]:
            raise AssertionError("\n".join(errors))
        return next(answer for rank, _, answer in found if rank == 0)

    ranks = _start(_answer_in_groups, most, (dict(os.environ), backend, requests, answers))
    yield call_ranks
    for queue in requests:
        queue.put(None)
    join_ranks(ranks)


@contextmanager
def ranks_to_kill(world: int, function: Callable[..., Any], *arguments: Any) -> Iterator[list[Any]]:
    """Yield processes of ranks that call `function(*arguments)`, for tests that kill them; all are ended afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(_rank, world, (dict(os.environ), world, folder, function, arguments)).processes
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _next_answer(answers: "Queue[Any]", ranks: Any, *, seconds: float = 240.0) -> Any:
    """Return the next answer. Raises AssertionError as soon as a rank has ended, whose answer would never come."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            return answers.get(timeout=1.0)
        except Empty:
            codes = {rank: one.exitcode for rank, one in enumerate(ranks.processes) if one.exitcode is not None}
            assert not codes, f"ranks have ended, with these exit codes: {codes}"
    raise AssertionError(f"no answer within {seconds:g} s")


def _start(function: Callable[..., None], world: int, arguments: tuple[Any, ...]) -> Any:
    return start_ranks(function, world, arguments, preload=["tests.support.ranks.preload"])


def _rank(
    rank: int,
    environment: dict[str, str],
    world: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    with rank_group(rank, environment, world, folder):
        torch.save(function(*arguments), Path(folder, f"{rank}.pt"))
    leave()


def _answer(
    rank: int, environment: dict[str, str], world: int, folder: str, requests: "list[Queue[Any]]", answers: "Queue[Any]"
) -> None:
    with rank_group(rank, environment, world, folder):
        while (request := requests[rank].get()) is not None:
            function, arguments = request
            try:
                answer: tuple[str | None, Any] = (None, function(*arguments))
            except Exception:
                answer = traceback.format_exc(), None
            if rank == 0 or answer[0]:
                answers.put(answer)
    answers.close()
    answers.join_thread()
    leave()


def _answer_in_groups(
    rank: int, environment: dict[str, str], backend: str, requests: "list[Queue[Any]]", answers: "Queue[Any]"
) -> None:
    # A run freezes its model, because its process ends after it. Frozen groups would keep their threads here.
    gc.freeze = lambda: None
    while (request := requests[rank].get()) is not None:
        world, folder, function, arguments = request
        answer: tuple[int, str | None, Any]
        try:
            with rank_group(rank, environment, world, folder, backend):
                answer = rank, None, function(*arguments)
        except Exception:
            answer = rank, traceback.format_exc(), None
        # torch remembers meshes of equal shape, whose groups are others in the next group of ranks.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        gc.collect()
        # The caller then removes the group's folder. A file store that is destroyed meanwhile aborts the process.
        answers.put(answer)
    answers.close()
    answers.join_thread()
    leave()
