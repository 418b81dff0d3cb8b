"""Group commit: requests that arrive while a batch is processed form the next batch."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Generic, TypeVar

from service.errors import NotReady

A = TypeVar("A", bound=Hashable)
B = TypeVar("B")


class GroupCommit(Generic[A, B]):
    """A batcher: one call of `answer`, in a thread, handles all waiting requests. It returns answers by request.

    If that call fails, `answer` is called for each request separately, so that an error affects only its own request.
    DeWitt et al., "Implementation techniques for main memory database systems" (1984): one wait for the disk can commit
    many transactions. Here the requests also share the switch to a thread and back, which costs as much.
    """

    def __init__(self, answer: Callable[[Sequence[A]], Mapping[A, B]]) -> None:
        self._answer = answer
        self._waiting: deque[tuple[A, asyncio.Future[B | None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="together")
        self._next_turn_waits = False

    async def __call__(self, request: A) -> B | None:
        """Return the answer to this request; None if `answer` leaves it out. Raises the errors of `answer`."""
        answered: asyncio.Future[B | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answered))
        if not self._next_turn_waits:
            # One turn waits at most: waking the thread costs as much as a request.
            self._next_turn_waits = True
            self._thread.submit(self._take_turn)
        return await answered

    def _take_turn(self) -> None:
        batch = []
        # A request that arrives from here on asks for a turn, which does nothing if this turn takes the request.
        self._next_turn_waits = False
        while self._waiting:
            batch.append(self._waiting.popleft())
        if batch:
            self._answer_all(batch)

    def _answer_all(self, batch: Sequence[tuple[A, "asyncio.Future[B | None]"]]) -> None:
        results: list[tuple[asyncio.Future[B | None], B | Exception | None]]
        try:
            answers = self._answer([request for request, _ in batch])
        except Exception as error:
            # No separate calls if the service is not ready: each would wait for its own timeout, one after another.
            if len(batch) > 1 and not isinstance(error, NotReady):
                for one in batch:
                    self._answer_all([one])
                return
            results = [(answered, error) for _, answered in batch]
        else:
            results = [(answered, answers.get(request)) for request, answered in batch]
        for loop, group in groupby(results, key=lambda result: result[0].get_loop()):
            loop.call_soon_threadsafe(_resolve, list(group))


def _resolve(results: "Iterable[tuple[asyncio.Future[B | None], B | Exception | None]]") -> None:
    for answered, result in results:
        if answered.done():
            # The caller was cancelled and no longer waits.
            continue
        if isinstance(result, Exception):
            answered.set_exception(result)
        else:
            answered.set_result(result)
