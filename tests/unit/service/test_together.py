"""Group commit: what comes while others are answered is answered at once, and each has its own trouble."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from service.api.group_commit import Together

LIMIT_SECONDS = 10.0


class Doubling:
    """Answers the double of each number, the first time only once it is let go; odd ones below 100 are refused."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.first, self.go = threading.Event(), threading.Event()

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        """The doubles. Raises ValueError."""
        self.asked.append(list(numbers))
        self.first.set()
        assert self.go.wait(LIMIT_SECONDS)
        if any(number < 100 and number % 2 for number in numbers):
            raise ValueError(f"not {numbers}")
        return [2 * number for number in numbers]


async def _ask(doubling: Doubling, first: int, others: Sequence[int]) -> "list[asyncio.Task[int]]":
    """The others come while the first one is being answered."""
    together = Together(doubling)
    tasks = [asyncio.create_task(together(first))]
    assert await asyncio.to_thread(doubling.first.wait, LIMIT_SECONDS)
    tasks += [asyncio.create_task(together(number)) for number in others]
    await asyncio.sleep(0)
    return tasks


def test_what_waits_is_answered_at_once() -> None:
    doubling, others = Doubling(), range(1000, 1064)

    async def ask() -> list[int]:
        tasks = await _ask(doubling, 100, others)
        doubling.go.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_SECONDS)

    assert asyncio.run(ask()) == [200, *(2 * number for number in others)]
    assert doubling.asked == [[100], list(others)]


def test_one_that_fails_fails_alone() -> None:
    doubling, others = Doubling(), range(2, 20)

    async def ask() -> list[int | BaseException]:
        tasks = await _ask(doubling, 1, others)
        doubling.go.set()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_SECONDS)

    told = [f"not [{number}]" if number % 2 else str(2 * number) for number in (1, *others)]
    assert [str(answer) for answer in asyncio.run(ask())] == told


def test_who_has_gone_keeps_nobody_waiting() -> None:
    doubling = Doubling()

    async def ask() -> list[int]:
        tasks = await _ask(doubling, 1, [200, 300, 400])
        for gone in tasks[:2]:
            gone.cancel()
        doubling.go.set()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return await asyncio.wait_for(asyncio.gather(*tasks[2:]), LIMIT_SECONDS)

    assert asyncio.run(ask()) == [600, 800]


def test_what_comes_to_the_next_loop_is_answered_as_well() -> None:
    doubling = Doubling()
    doubling.go.set()
    together = Together(doubling)

    async def ask(number: int) -> int:
        return await asyncio.wait_for(together(number), LIMIT_SECONDS)

    assert [asyncio.run(ask(number)) for number in (100, 102)] == [200, 204]
