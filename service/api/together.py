"""Group commit: what requests ask for while others are being answered is answered next, at once."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Generic, TypeVar

from service.errors import NotReady

A = TypeVar("A")
B = TypeVar("B")


class Together(Generic[A, B]):
    """Calls `answer` in a thread with all that waits; where that fails, once for each, so one's trouble is its own.

    DeWitt et al., "Implementation techniques for main memory database systems" (1984): a commit waits for the disk, and
    can do so for many. Here many share the way to a thread and back as well, which costs as much.
    """

    def __init__(self, answer: Callable[[Sequence[A]], Sequence[B]]) -> None:
        self._answer = answer
        self._waiting: deque[tuple[A, asyncio.Future[B]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="together")

    async def __call__(self, asked: A) -> B:
        """The answer to this one. Raises what `answer` raises for it."""
        mine: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, mine))
        self._thread.submit(self._take_turn)
        return await mine

    def _take_turn(self) -> None:
        some = []
        # Whoever comes from here on has a turn of its own, which finds nothing if this one takes it along.
        while self._waiting:
            some.append(self._waiting.popleft())
        if some:
            self._answer_all(some)

    def _answer_all(self, some: Sequence[tuple[A, "asyncio.Future[B]"]]) -> None:
        answers: Sequence[B | Exception]
        try:
            answers = self._answer([asked for asked, _ in some])
        except Exception as error:
            # A database that is away would cost each of them its time limit, one after the other.
            if len(some) > 1 and not isinstance(error, NotReady):
                for one in some:
                    self._answer_all([one])
                return
            answers = [error] * len(some)
        told = zip([mine for _, mine in some], answers, strict=True)
        for loop, theirs in groupby(told, key=lambda one: one[0].get_loop()):
            loop.call_soon_threadsafe(_tell, list(theirs))


def _tell(answers: "Iterable[tuple[asyncio.Future[B], B | Exception]]") -> None:
    for asked, answer in answers:
        if asked.done():
            # Whoever has gone does not wait any more.
            continue
        if isinstance(answer, Exception):
            asked.set_exception(answer)
        else:
            asked.set_result(answer)
