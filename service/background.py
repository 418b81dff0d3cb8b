"""What goes on beside the answers, for as long as the app runs: started and ended in order, each in its time."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from service.leaving import Leaving

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """One of them: how it starts and ends, and for how many seconds its end is waited for."""

    name: str
    start: Callable[[], object]
    stop: Callable[[], object]
    seconds: float


def looping(name: str, loop: Callable[[threading.Event], object], *, seconds: float) -> Part:
    """A part that is one thread, which ends once its event is set."""
    stopped = threading.Event()
    thread = threading.Thread(target=loop, args=(stopped,), name=name, daemon=True)

    def stop() -> None:
        stopped.set()
        if thread.ident is not None:
            thread.join()

    return Part(name, thread.start, stop, seconds)


class Background:
    """Starts parts in order, and ends those that were started, the last one first."""

    def __init__(self, parts: Sequence[Part], leaving: Leaving) -> None:
        self._parts = parts
        self._leaving = leaving
        self._started = list[Part]()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start all of it, and end it."""
        for part in self._parts:
            self._start(part)
        try:
            yield
        finally:
            self._leaving.set()
            await run_in_threadpool(self._end)

    def _start(self, part: Part) -> None:
        self._started.append(part)
        part.start()

    def _end(self) -> None:
        for part in reversed(self._started):
            self._leaving.waits_for = part.name
            _end_in_time(part)


def _end_in_time(part: Part) -> None:
    """End a part, or leave it to the end of the process where that takes too long."""

    def stop() -> None:
        try:
            part.stop()
        except Exception:
            log.exception("part_did_not_end_well", part=part.name)

    thread = threading.Thread(target=stop, name=f"end {part.name}", daemon=True)
    thread.start()
    thread.join(part.seconds)
    if thread.is_alive():
        log.warning("part_did_not_end_in_time", part=part.name, seconds=part.seconds)
