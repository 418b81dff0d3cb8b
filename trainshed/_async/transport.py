"""Sending of calls and following of streams, with retries."""

from asyncio import sleep
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import httpx
from httpx_sse import EventSource

from trainshed.call import Call
from trainshed.errors import ApiError, error_of
from trainshed.retry import Retry
from trainshed.stream import StreamCursor

T = TypeVar("T")


@dataclass(frozen=True)
class AsyncTransport:
    """A connection to a service. A call is retried for `patience` seconds, as long as a retry is safe."""

    http: httpx.AsyncClient
    patience: float

    async def _send(self, call: Call[T]) -> T:
        """Return the response of a call. Raises ApiError, or httpx.HTTPError if the service does not answer."""
        retry = Retry(call, self.patience)
        while True:
            try:
                return retry.read(await self.http.send(call.request(self.http)))
            except (httpx.HTTPError, ApiError) as error:
                seconds = retry.delay(error)
            await sleep(seconds)

    async def _follow(self, call: Call[T]) -> AsyncIterator[T]:
        """Yield the lines of a stream, over all its reconnects. Raises as `_send` does."""
        cursor = StreamCursor(call, self.patience)
        while True:
            error: Exception | None = None
            try:
                async with aclosing(self._connect(cursor)) as lines:
                    async for line in lines:
                        yield line
            except (httpx.HTTPError, ApiError) as disconnect:
                error = disconnect
            if cursor.ended:
                return
            await sleep(cursor.delay(error))

    async def _connect(self, cursor: StreamCursor[T]) -> AsyncGenerator[T, None]:
        """Yield lines until the stream ends or is disconnected."""
        request = cursor.call.request(self.http, **cursor.headers)
        async with aclosing(await self.http.send(request, stream=True)) as response:
            if not response.is_success:
                await response.aread()
                raise error_of(response)
            cursor.connected()
            async with aclosing(EventSource(response).aiter_sse()) as events:
                async for event in events:
                    for line in cursor.advance(event):
                        yield line
                    if cursor.ended:
                        return
