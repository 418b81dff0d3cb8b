# Generated from trainshed/_async/transport.py by `make client`; do not edit.

"""Sending of calls and following of streams, with retries."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from time import sleep
from typing import TypeVar

import httpx
from httpx_sse import EventSource

from trainshed.call import Call
from trainshed.errors import ApiError, error_of
from trainshed.retry import Retry
from trainshed.stream import StreamCursor

T = TypeVar("T")


@dataclass(frozen=True)
class Transport:
    """A connection to a service. A call is retried for `patience` seconds, as long as a retry is safe."""

    http: httpx.Client
    patience: float

    def _send(self, call: Call[T]) -> T:
        """Return the response of a call. Raises ApiError, or httpx.HTTPError if the service does not answer."""
        retry = Retry(call, self.patience)
        while True:
            try:
                return retry.read(self.http.send(call.request(self.http)))
            except (httpx.HTTPError, ApiError) as error:
                seconds = retry.delay(error)
            sleep(seconds)

    def _follow(self, call: Call[T]) -> Iterator[T]:
        """Yield the lines of a stream, over all its reconnects. Raises as `_send` does."""
        cursor = StreamCursor(call, self.patience)
        while True:
            error: Exception | None = None
            try:
                with closing(self._connect(cursor)) as lines:
                    yield from lines
            except (httpx.HTTPError, ApiError) as disconnect:
                error = disconnect
            if cursor.ended:
                return
            sleep(cursor.delay(error))

    def _connect(self, cursor: StreamCursor[T]) -> Generator[T, None]:
        """Yield lines until the stream ends or is disconnected."""
        request = cursor.call.request(self.http, **cursor.headers)
        with closing(self.http.send(request, stream=True)) as response:
            if not response.is_success:
                response.read()
                raise error_of(response)
            cursor.connected()
            with closing(EventSource(response).iter_sse()) as events:
                for event in events:
                    yield from cursor.advance(event)
                    if cursor.ended:
                        return
