"""What goes on beside the answers, for as long as the app runs: started and ended in order, each in its time."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from service.leaving import Leaving
from service.opening import Opening

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """One of them: how it starts and ends, and for how many seconds its end is waited for."""

    name: str
    start: Callable[[], object]
    stop: Callable[[], object]
    seconds: float


def looping(name: str, loop: Callable[[threading.Event], object], leaving: Leaving, *, seconds: float) -> Part:
    """A part that is one thread, which ends by itself once the service is to end."""
    thread = threading.Thread(target=loop, args=(leaving,), name=name, daemon=True)
    return Part(name, thread.start, thread.join, seconds)


class Background:
    """Starts parts in order, some of them once the database is open; ends those that were started, the last first."""

    def __init__(self, parts: Sequence[Part], once_open: Sequence[Part], opening: Opening, leaving: Leaving) -> None:
        self._parts = parts
        self._once_open = once_open
        self._opening = opening
        self._leaving = leaving
        self._lock = threading.Lock()
        self._started = list[Part]()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start all of it, and end it."""
        self.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.end)

    def start(self) -> None:
        """Start what needs no database, and begin to open that."""
        for part in self._parts:
            self._start(part)
        # A daemon: a migration that is cut off has changed nothing.
        threading.Thread(target=self._open, name="opening", daemon=True).start()

    def end(self) -> None:
        """End all of it, each part in its time."""
        self._leaving.set()
        with self._lock:
            started = self._started[::-1]
        for part in started:
            self._leaving.waits_for = part.name
            _end_in_time(part)
        self._leaving.waits_for = "the end of the process"

    def _open(self) -> None:
        if self._opening.run(self._leaving):
            for part in self._once_open:
                self._start(part)

    def _start(self, part: Part) -> None:
        with self._lock:
            if not self._leaving.is_set():
                part.start()
                self._started.append(part)


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
