"""Group commit: what several threads ask for while one of them writes is written next, at once."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Asked(Generic[T]):
    item: T
    done: bool = False
    error: BaseException | None = None


class Together(Generic[T]):
    """Calls `write` with all that waits; where that fails, once for each, so that one's trouble is its own.

    DeWitt et al., "Implementation techniques for main memory database systems" (1984): a commit waits for the disk, and
    can do so for many.
    """

    def __init__(self, write: Callable[[Sequence[T]], None]) -> None:
        self._write = write
        self._waiting: list[_Asked[T]] = []
        self._list, self._turn = threading.Lock(), threading.Lock()

    def __call__(self, item: T) -> None:
        """Have it written, and wait until it is. Raises what `write` raises for it."""
        mine = _Asked(item)
        with self._list:
            self._waiting.append(mine)
        with self._turn:
            if not mine.done:
                with self._list:
                    some, self._waiting = self._waiting, []
                self._write_all(some)
        if mine.error is not None:
            raise mine.error

    def _write_all(self, some: Sequence[_Asked[T]]) -> None:
        try:
            self._write([asked.item for asked in some])
        except BaseException as error:
            if len(some) > 1 and isinstance(error, Exception):
                for asked in some:
                    self._write_all([asked])
                return
            for asked in some:
                asked.error = error
        for asked in some:
            asked.done = True
