"""Output of a run as server-sent events. The id of each is the cursor after it; the last event is `end`."""

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from fastapi.sse import EventSourceResponse, format_sse_event

from service.api.authentication import CallerIs, guard_of
from service.api.routes.jobs import UseCases
from service.domain.access.roles import Principal
from service.errors import JobNotFound
from service.ports import Cursor, LogLine, LogOffset, Metrics
from service.use_cases.jobs.jobs import Jobs
from service.use_cases.runs.streams import LogStream, Reader, Signal, Subscriber, numbered

_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that make nginx, a common proxy in front of clusters, forward each event at once."""


@dataclass(frozen=True)
class Message:
    """A server-sent event: JSON data, and the cursor to resume after it."""

    id: str
    data: str


@dataclass(frozen=True)
class Sender:
    """A factory of the streams of one request."""

    request: Request
    caller: Principal
    jobs: Jobs

    @property
    def wanted(self) -> bool:
        """True if the caller asked for a stream."""
        return asks_for_stream(self.request)

    def text(self, reader: Reader, place: LogOffset, job_id: str) -> EventSourceResponse:
        """Stream the lines of a log; ids are positions in it."""
        return self._answer(_id(place), _as_text(self._follow(reader, place, job_id)))

    def lines(self, reader: Reader, cursor: Cursor, job_id: str) -> EventSourceResponse:
        """Stream the JSON lines of all attempts after a cursor; ids are cursors."""
        entries = self._follow(reader, LogOffset(cursor.attempt), job_id)
        return self._answer(str(cursor), _behind(entries, cursor))

    def _answer(self, begin: str, messages: AsyncIterator[Message | Signal]) -> EventSourceResponse:
        parts = _counted(_send(begin, messages), self.request.app.state.service_metrics.metrics)
        return EventSourceResponse(parts, headers=_UNBUFFERED)

    def _follow(self, reader: Reader, place: LogOffset, job_id: str) -> AsyncIterator[LogLine | Signal]:
        ended = partial(_has_ended, self.caller, self.jobs, job_id)
        state, caller = self.request.app.state, self.caller
        listener = Subscriber((caller.id, caller.until), partial(state.access.is_valid, caller))
        return LogStream(reader, ended, state.shutdown, listener, state.read_cache).follow(place)


async def sender_of(request: Request, caller: CallerIs, jobs: UseCases) -> AsyncIterator[Sender]:
    """Yield the stream factory of this request. A stream counts as open until its response ends. Raises RateLimited."""
    counted = asks_for_stream(request)
    with guard_of(request).rates.stream(caller) if counted else nullcontext():
        yield Sender(request, caller, jobs)


Streams = Annotated[Sender, Depends(sender_of)]


def asks_for_stream(request: Request) -> bool:
    """Return True if the caller accepts server-sent events."""
    return "text/event-stream" in request.headers.get("accept", "")


def _has_ended(caller: Principal, jobs: Jobs, job_id: str) -> bool:
    try:
        return jobs.find(caller, job_id).state.terminal
    except JobNotFound:
        return True


async def _behind(entries: AsyncIterator[LogLine | Signal], cursor: Cursor) -> AsyncIterator[Message | Signal]:
    """Yield the lines after a cursor, each with its own cursor. Lines without a sequence number are skipped."""
    async for entry in entries:
        if isinstance(entry, Signal):
            yield entry
            continue
        if (found := numbered(entry, cursor)) is not None:
            yield Message(str(found.cursor), found.text)


async def _as_text(entries: AsyncIterator[LogLine | Signal]) -> AsyncIterator[Message | Signal]:
    """Yield the lines of a log as JSON: a raw line may contain characters that end a line in an event stream."""
    async for entry in entries:
        if isinstance(entry, Signal):
            yield entry
        else:
            yield Message(_id(entry.after), json.dumps(entry.text))


def _id(place: LogOffset) -> str:
    return f"{place.attempt}.{place.offset}"


async def _counted(parts: AsyncIterator[bytes], metrics: Metrics) -> AsyncIterator[bytes]:
    metrics.followed(more=True)
    try:
        async for part in parts:
            yield part
    finally:
        metrics.followed(more=False)


async def _send(begin: str, messages: AsyncIterator[Message | Signal]) -> AsyncIterator[bytes]:
    # Sent at once: the client knows that the stream is open, and can resume from here before the first line.
    yield format_sse_event(comment="begin", id=begin)
    async for message in messages:
        if isinstance(message, Message):
            yield format_sse_event(data_str=message.data, id=message.id)
        elif message is Signal.STILL_HERE:
            yield format_sse_event(comment="still here")
        else:
            yield format_sse_event(event="end", data_str="")
