"""Group commit: calls that arrive during a batch form the next batch, and each gets its own result or error."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from service.api.group_commit import GroupCommit

LIMIT_SECONDS = 10.0


class Doubling:
    """A batch function that doubles numbers once `go` is set; odd numbers below 100 raise ValueError."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.first, self.go = threading.Event(), threading.Event()

    def __call__(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return the doubles, but none of 0. Raises ValueError."""
        self.batches.append(list(numbers))
        self.first.set()
        assert self.go.wait(LIMIT_SECONDS)
        if any(number < 100 and number % 2 for number in numbers):
            raise ValueError(f"not {numbers}")
        return {number: 2 * number for number in numbers if number}


async def _start_calls(doubling: Doubling, first: int, others: Sequence[int]) -> "list[asyncio.Task[int | None]]":
    """Start a call with `first`, then calls with `others` while the first is in flight."""
    together = GroupCommit(doubling)
    tasks = [asyncio.create_task(together(first))]
    assert await asyncio.to_thread(doubling.first.wait, LIMIT_SECONDS)
    tasks += [asyncio.create_task(together(number)) for number in others]
    await asyncio.sleep(0)
    return tasks


def test_waiting_calls_form_one_batch() -> None:
    doubling, others = Doubling(), range(1000, 1064)

    async def run() -> list[int | None]:
        tasks = await _start_calls(doubling, 100, others)
        doubling.go.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_SECONDS)

    assert asyncio.run(run()) == [200, *(2 * number for number in others)]
    assert doubling.batches == [[100], list(others)]


def test_failing_call_fails_alone() -> None:
    doubling, others = Doubling(), range(2, 20)

    async def run() -> list[int | BaseException | None]:
        tasks = await _start_calls(doubling, 1, others)
        doubling.go.set()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_SECONDS)

    expected = [f"not [{number}]" if number % 2 else str(2 * number) for number in (1, *others)]
    assert [str(answer) for answer in asyncio.run(run())] == expected


def test_cancelled_calls_do_not_block_others() -> None:
    doubling = Doubling()

    async def run() -> list[int | None]:
        tasks = await _start_calls(doubling, 1, [200, 300, 400])
        for gone in tasks[:2]:
            gone.cancel()
        doubling.go.set()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return await asyncio.wait_for(asyncio.gather(*tasks[2:]), LIMIT_SECONDS)

    assert asyncio.run(run()) == [600, 800]


def test_calls_from_a_later_event_loop_are_answered() -> None:
    doubling = Doubling()
    doubling.go.set()
    together = GroupCommit(doubling)

    async def run(number: int) -> int | None:
        return await asyncio.wait_for(together(number), LIMIT_SECONDS)

    assert [asyncio.run(run(number)) for number in (100, 102)] == [200, 204]


def test_call_left_out_of_the_answers_returns_none() -> None:
    doubling = Doubling()

    async def run() -> list[int | None]:
        tasks = await _start_calls(doubling, 100, [0, 200])
        doubling.go.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_SECONDS)

    assert asyncio.run(run()) == [200, None, 400]
