"""Reading what a run writes, line by line, from any place on, over all attempts; and following it to the job's end."""

import math
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Any, TypeVar

import anyio
from starlette.concurrency import run_in_threadpool

from service.errors import NotReady, StorageAway
from service.filters import Filter
from service.lines import number, parse
from service.ports import Cursor, Entry, Line, Place, RunDirs, Written

T = TypeVar("T")


class Signal(Enum):
    """What is said beside lines."""

    STILL_HERE = auto()
    END = auto()
    """The job has ended, and all of it was read."""


_LOOK_SECONDS = 0.5
_WINDOWS = 64
"""Parts of a file that are looked at before an answer, however few lines pass."""
_END_SECONDS = 2.0
_LISTENER_SECONDS = 2.0
_MOST_ANSWERS = 10_000
_BEAT_SECONDS = 15.0


@dataclass(frozen=True)
class Batch:
    """Lines, the place behind them, and whether there is more to read at once."""

    entries: tuple[Entry, ...]
    place: Place
    more: bool


@dataclass(frozen=True)
class Reader:
    """One kind of what a run writes; of one attempt where `stays`, otherwise of it and all after it."""

    run_dirs: RunDirs
    run_dir: str
    what: Written
    stays: bool = False
    filters: tuple[Filter, ...] = ()

    def mark(self) -> Hashable:
        """Another value whenever there may be more to read; much quicker than reading."""
        return self.run_dirs.mark(self.run_dir, self.what)

    def read(self, place: Place, *, limit: int = 1000) -> Batch:
        """The next lines from a place on that pass every filter; it looks at a bounded part of what there is."""
        found = list[Entry]()
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
                # What an attempt writes is all there before the next one begins.
                if tail.next_attempt is None or self.stays:
                    return Batch((), place, more=False)
                place = Place(tail.next_attempt)
        return Batch((), place, more=True)


@dataclass(frozen=True)
class Numbered:
    """A line of JSON, and the cursor behind it."""

    line: Line
    text: str
    cursor: Cursor


def numbered(entry: Entry, after: Cursor) -> Numbered | None:
    """An entry that lies behind a cursor; None for one that does not, or is no line of ours."""
    line = parse(entry.text)
    seq = number(line, "seq") if line is not None else None
    if line is None or seq is None:
        return None
    cursor = Cursor(entry.after.attempt, int(seq))
    return Numbered(line, entry.text, cursor) if (cursor.attempt, cursor.seq) > (after.attempt, after.seq) else None


def read_lines(reader: Reader, after: Cursor) -> Iterator[Numbered]:
    """The lines of JSON behind a cursor that are there now, of which a bounded part is held at once."""
    place = Place(after.attempt)
    while True:
        batch = reader.read(place)
        yield from (line for line in (numbered(entry, after) for entry in batch.entries) if line is not None)
        # Where an attempt ends the next one begins, if there is one.
        if not batch.more and not batch.entries:
            return
        place = batch.place


def read_page(reader: Reader, after: Cursor, limit: int) -> tuple[list[Numbered], bool]:
    """The next lines of JSON behind a cursor, and whether there are more."""
    found = list(islice(read_lines(reader, after), limit + 1))
    return found[:limit], len(found) > limit


class Recent:
    """Answers that many who follow share for a moment, so that a thousand of them cost little more than one."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[float, Any]] = {}

    async def ask(self, key: Hashable, call: Callable[[], T], *, seconds: float) -> T:
        """The answer of a call, at most so many seconds old, and while it is asked again the one before."""
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.clear()
        now = anyio.current_time()
        asked, answer = self._answers.get(key, (-math.inf, None))
        if now - asked >= seconds:
            if key in self._answers:
                self._answers[key] = now, answer
            answer = await run_in_threadpool(call)
            self._answers[key] = now, answer
        found: T = answer
        return found


@dataclass(frozen=True)
class Listener:
    """Who follows: what all streams of one have in common, and whether they may go on."""

    id: Hashable
    may_stay: Callable[[], bool] = field(compare=False)


@dataclass(frozen=True)
class Follower:
    """Follows a reader until the job has ended, the listener may not stay, or the service leaves."""

    reader: Reader
    ended: Callable[[], bool]
    leaving: threading.Event
    listener: Listener
    recent: Recent = field(default_factory=Recent)

    async def follow(self, place: Place) -> AsyncIterator[Entry | Signal]:
        """Every line from a place on, as it comes, and now and then a word that somebody is there.

        It ends in order, without END, if the database goes away: the caller resumes by the id of the last line.
        """
        # The answer has begun, and its status can no longer be changed.
        with suppress(NotReady):
            async for found in self._follow(place):
                yield found

    async def _follow(self, place: Place) -> AsyncIterator[Entry | Signal]:
        over, told, read = False, anyio.current_time(), None
        run_dir, what = self.reader.run_dir, self.reader.what
        while not self.leaving.is_set() and await self._may_stay():
            batch = Batch((), place, more=False)
            try:
                # Taken before it is read: what comes in between makes it another one.
                mark = await self.recent.ask((run_dir, what), self.reader.mark, seconds=_LOOK_SECONDS / 2)
                if mark != read or over:
                    batch = await run_in_threadpool(self.reader.read, place)
            except StorageAway:
                # The stream goes on once storage is back; a job that has ended meanwhile is read to its end then.
                mark, over = read, False
            place = batch.place
            for entry in batch.entries:
                yield entry
            now = anyio.current_time()
            if batch.entries or batch.more:
                told = now
                continue
            read = mark
            if over:
                yield Signal.END
                return
            if now - told >= _BEAT_SECONDS:
                yield Signal.STILL_HERE
                told = now
            # What was written before it ended is read once more.
            over = await self.recent.ask(run_dir, self.ended, seconds=_END_SECONDS)
            if not over:
                await anyio.sleep(_LOOK_SECONDS)

    async def _may_stay(self) -> bool:
        return await self.recent.ask(self.listener, self.listener.may_stay, seconds=_LISTENER_SECONDS)
