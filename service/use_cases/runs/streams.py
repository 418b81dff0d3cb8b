"""Reading and following the files of a run line by line, from any position, over all attempts, to the job's end."""

import math
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import anyio
from starlette.concurrency import run_in_threadpool

from service.domain.runs.json_lines import Line, number, parse
from service.errors import NotReady, StorageAway
from service.ports import Cursor, LogLine, LogOffset, LogSource, RunDirs
from service.use_cases.runs.filters import Filter

T = TypeVar("T")


class Signal(Enum):
    """An item of a stream that is not a line."""

    STILL_HERE = auto()
    """Heartbeat: the stream is open, and there are no new lines."""
    END = auto()
    """End of stream: the job has finished, and all lines were read."""


_POLL_SECONDS = 0.5
_WINDOWS = 64
"""Maximum number of file windows that one read scans for matching lines."""
_END_SECONDS = 2.0
_LISTENER_SECONDS = 2.0
_MOST_ANSWERS = 10_000
_BEAT_SECONDS = 15.0
_THREADS = 4
"""Threads that read for all streams: others' requests do not wait behind hundreds of streams that begin at once."""


@dataclass(frozen=True)
class Batch:
    """Lines, the position after them, and True if more can be read at once."""

    entries: tuple[LogLine, ...]
    place: LogOffset
    more: bool


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of a run's files: of one attempt if `stays`, otherwise also of the later ones."""

    run_dirs: RunDirs
    run_dir: str
    what: LogSource
    stays: bool = False
    filters: tuple[Filter, ...] = ()

    def mark(self) -> Hashable:
        """Return a value that changes whenever there may be more to read; much faster than reading."""
        return self.run_dirs.mark(self.run_dir, self.what)

    def read(self, place: LogOffset, *, limit: int = 1000) -> Batch:
        """Return the next lines from a position that pass every filter. Reads a bounded part of the file."""
        found = list[LogLine]()
        for _ in range(_WINDOWS):
            tail = self.run_dirs.tail(self.run_dir, self.what, place)
            for entry in tail.entries:
                place = entry.after
                if all(passes(entry.text) for passes in self.filters):
                    found.append(entry)
                if len(found) == limit:
                    return Batch(tuple(found), place, tail.more or entry is not tail.entries[-1])
            if found or (tail.entries and not self.filters):
                return Batch(tuple(found), place, tail.more)
            if not tail.entries:
                # An attempt has written all its lines before the next one begins.
                if tail.next_attempt is None or self.stays:
                    return Batch((), place, more=False)
                place = LogOffset(tail.next_attempt)
        return Batch((), place, more=True)


@dataclass(frozen=True)
class Numbered:
    """A line of JSON, and the cursor after it."""

    line: Line
    text: str
    cursor: Cursor


def numbered(entry: LogLine, after: Cursor) -> Numbered | None:
    """Parse an entry; return None if it is not after the cursor, or is not a numbered line of JSON."""
    line = parse(entry.text)
    seq = number(line, "seq") if line is not None else None
    if line is None or seq is None:
        return None
    cursor = Cursor(entry.after.attempt, int(seq))
    return Numbered(line, entry.text, cursor) if (cursor.attempt, cursor.seq) > (after.attempt, after.seq) else None


def read_lines(reader: Reader, after: Cursor) -> Iterator[Numbered]:
    """Yield the existing lines of JSON after a cursor, with bounded memory."""
    place = LogOffset(after.attempt)
    while True:
        batch = reader.read(place)
        yield from (line for line in (numbered(entry, after) for entry in batch.entries) if line is not None)
        # An empty batch means the end: at the end of an attempt, the reader continues with the next one.
        if not batch.more and not batch.entries:
            return
        place = batch.place


def read_page(reader: Reader, after: Cursor, limit: int) -> tuple[list[Numbered], bool]:
    """Return the next lines of JSON after a cursor, and True if there are more."""
    found = list(islice(read_lines(reader, after), limit + 1))
    return found[:limit], len(found) > limit


class ReadCache:
    """A short-lived cache that streams share, so that a thousand streams cost little more than one."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[float, Any]] = {}
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def get(self, key: Hashable, call: Callable[[], T], *, seconds: float) -> T:
        """Return the result of a call, cached for `seconds`. While it is refreshed, others get the previous result."""
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.clear()
        now = anyio.current_time()
        called_at, answer = self._answers.get(key, (-math.inf, None))
        if now - called_at >= seconds:
            if key in self._answers:
                self._answers[key] = now, answer
            answer = await run_in_threadpool(call)
            self._answers[key] = now, answer
        found: T = answer
        return found

    async def read(self, call: Callable[[], T]) -> T:
        """Return the result of a read in one of the few threads of all streams."""
        return await anyio.to_thread.run_sync(call, limiter=self._threads)


@dataclass(frozen=True)
class Subscriber:
    """A subscriber of streams, and the check that its access is still valid."""

    id: Hashable
    may_stay: Callable[[], bool] = field(compare=False)


@dataclass(frozen=True)
class LogStream:
    """A stream of a reader's lines until the job has finished, access ends, or the service shuts down."""

    reader: Reader
    ended: Callable[[], bool]
    shutdown: threading.Event
    listener: Subscriber
    read_cache: ReadCache = field(default_factory=ReadCache)

    async def follow(self, place: LogOffset) -> AsyncIterator[LogLine | Signal]:
        """Yield every line from a position as it is written, and STILL_HERE every 15 s without one.

        If the database is lost, the stream ends without END: the caller resumes with the id of the last line.
        """
        # The response has started, so its status can no longer change.
        with suppress(NotReady):
            async for found in self._follow(place):
                yield found

    async def _follow(self, place: LogOffset) -> AsyncIterator[LogLine | Signal]:
        over, last_sent, read = False, anyio.current_time(), None
        run_dir, what = self.reader.run_dir, self.reader.what
        while not self.shutdown.is_set() and await self._may_stay():
            batch = Batch((), place, more=False)
            try:
                # Taken before the read, so that a line written meanwhile changes it.
                mark = await self.read_cache.get((run_dir, what), self.reader.mark, seconds=_POLL_SECONDS / 2)
                if mark != read or over:
                    batch = await self.read_cache.read(partial(self.reader.read, place))
            except StorageAway:
                # The stream continues once storage is back, also to the end of a job that has finished meanwhile.
                mark, over = read, False
            place = batch.place
            for entry in batch.entries:
                yield entry
            now = anyio.current_time()
            if batch.entries or batch.more:
                last_sent = now
                continue
            read = mark
            if over:
                yield Signal.END
                return
            if now - last_sent >= _BEAT_SECONDS:
                yield Signal.STILL_HERE
                last_sent = now
            # After the job has finished, one more read gets its last lines.
            over = await self.read_cache.get(run_dir, self.ended, seconds=_END_SECONDS)
            if not over:
                await anyio.sleep(_POLL_SECONDS)

    async def _may_stay(self) -> bool:
        return await self.read_cache.get(self.listener, self.listener.may_stay, seconds=_LISTENER_SECONDS)
