"""Group commit: requests that arrive while a batch is processed form the next batch."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Generic, TypeVar

from service.errors import NotReady

A = TypeVar("A")
B = TypeVar("B")


class GroupCommit(Generic[A, B]):
    """A batcher: one call of `answer`, in a thread, handles all waiting requests.

    If that call fails, `answer` is called for each request separately, so that an error affects only its own request.
    DeWitt et al., "Implementation techniques for main memory database systems" (1984): one wait for the disk can commit
    many transactions. Here the requests also share the switch to a thread and back, which costs as much.
    """

    def __init__(self, answer: Callable[[Sequence[A]], Sequence[B]]) -> None:
        self._answer = answer
        self._waiting: deque[tuple[A, asyncio.Future[B]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="together")

    async def __call__(self, asked: A) -> B:
        """Return the answer to this request. Raises the errors of `answer`."""
        mine: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, mine))
        self._thread.submit(self._take_turn)
        return await mine

    def _take_turn(self) -> None:
        some = []
        # A request that arrives from here on has its own turn, which does nothing if this turn takes the request.
        while self._waiting:
            some.append(self._waiting.popleft())
        if some:
            self._answer_all(some)

    def _answer_all(self, some: Sequence[tuple[A, "asyncio.Future[B]"]]) -> None:
        answers: Sequence[B | Exception]
        try:
            answers = self._answer([asked for asked, _ in some])
        except Exception as error:
            # No separate calls if the service is not ready: each would wait for its own timeout, one after another.
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
            # The caller was cancelled and no longer waits.
            continue
        if isinstance(answer, Exception):
            asked.set_exception(answer)
        else:
            asked.set_result(answer)
