"""Background parts of the app: started one after another, stopped in reverse, each with a timeout."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from service.lifecycle.shutdown import Shutdown
from service.lifecycle.startup import DatabaseStartup

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """A background part: its start and stop functions, and the timeout of its stop in seconds."""

    name: str
    start: Callable[[], object]
    stop: Callable[[], object]
    seconds: float


def looping(name: str, loop: Callable[[threading.Event], object], shutdown: Shutdown, *, seconds: float) -> Part:
    """Return a part that runs a loop in a thread; the loop returns once `shutdown` is set."""
    thread = threading.Thread(target=loop, args=(shutdown,), name=name, daemon=True)
    return Part(name, thread.start, thread.join, seconds)


class Background:
    """Start and stop of the background parts: some start once the database is open; all stop in reverse."""

    def __init__(
        self, parts: Sequence[Part], with_database: Sequence[Part], startup: DatabaseStartup, shutdown: Shutdown
    ) -> None:
        self._parts = parts
        self._with_database = with_database
        self._startup = startup
        self._shutdown = shutdown
        self._lock = threading.Lock()
        self._started = list[Part]()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start the parts, and stop them when the app shuts down."""
        self.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.end)

    def start(self) -> None:
        """Start the parts that need no database, and a thread that opens the database."""
        for part in self._parts:
            self._start(part)
        # A daemon thread: an interrupted migration changes nothing.
        threading.Thread(target=self._open, name="opening", daemon=True).start()

    def end(self) -> None:
        """Stop the started parts, each within its timeout."""
        self._shutdown.set()
        with self._lock:
            started = self._started[::-1]
        for part in started:
            self._shutdown.waits_for = part.name
            _end_in_time(part)
        self._shutdown.waits_for = "process exit"

    def _open(self) -> None:
        if self._startup.run(self._shutdown):
            for part in self._with_database:
                self._start(part)

    def _start(self, part: Part) -> None:
        with self._lock:
            if not self._shutdown.is_set():
                part.start()
                self._started.append(part)


def _end_in_time(part: Part) -> None:
    """Stop a part. After its timeout, leave it running until the process exits."""

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
