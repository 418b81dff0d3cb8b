"""Group commit: what requests ask for while others are being answered is answered next, at once."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Together(Generic[A, B]):
    """Calls `answer` in a thread with all that waits; where that fails, once for each, so one's trouble is its own.

    DeWitt et al., "Implementation techniques for main memory database systems" (1984): a commit waits for the disk, and
    can do so for many. Here many share the way to a thread and back as well, which costs as much.
    """

    def __init__(self, answer: Callable[[Sequence[A]], Sequence[B]]) -> None:
        self._answer = answer
        self._waiting: list[tuple[A, asyncio.Future[B]]] = []
        self._turns: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="together")

    async def __call__(self, asked: A) -> B:
        """The answer to this one. Raises what `answer` raises for it."""
        mine: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, mine))
        if self._turns is None:
            self._turns = asyncio.create_task(self._take_turns())
        return await mine

    async def _take_turns(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting, []
                await self._answer_all(some)
        finally:
            self._turns = None

    async def _answer_all(self, some: Sequence[tuple[A, asyncio.Future[B]]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._answer, [asked for asked, _ in some])
        except Exception as error:
            if len(some) > 1:
                for one in some:
                    await self._answer_all([one])
            elif not some[0][1].done():
                some[0][1].set_exception(error)
            return
        for (_, future), answer in zip(some, answers, strict=True):
            # Whoever has gone does not wait any more.
            if not future.done():
                future.set_result(answer)
