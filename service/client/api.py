"""The REST API with one typed method per call: synchronous and asynchronous."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TypeVar

import httpx
from httpx_sse import EventSource
from tenacity import AsyncRetrying, Retrying, retry_if_exception, stop_before_delay

from service.client.access_calls import AccessCalls
from service.client.call import AsyncCaller, Call, Caller
from service.client.errors import ApiError, error_of
from service.client.job_calls import JobCalls
from service.client.retry import Tries, pause
from service.client.run_calls import RunCalls
from service.client.service_calls import ServiceCalls
from service.client.trail import Trail
from service.client.webhook_calls import WebhookCalls

T = TypeVar("T")


class Calls(JobCalls, RunCalls, AccessCalls, ServiceCalls, WebhookCalls):
    """All calls of the API. Each raises ApiError, or httpx.HTTPError if the service does not answer."""


@dataclass(frozen=True)
class Api(Calls, Caller):
    """The synchronous API: each call returns its response."""

    http: httpx.Client
    patience: float

    def do(self, call: Call[T]) -> T:
        """Return the response of a call. Retries as long as a retry is safe and may succeed."""
        tries = Tries(call)
        until = stop_before_delay(self.patience)
        again = Retrying(retry=retry_if_exception(tries.go_on), wait=pause, stop=until, reraise=True)
        return again(lambda: tries.read(self.http.send(call.request(self.http))))

    def follow(self, call: Call[T]) -> Iterator[T]:
        """Yield the lines of a stream, over all its reconnects."""
        trail = Trail(call, self.patience)
        while True:
            error: Exception | None = None
            try:
                yield from self._read(trail)
            except (httpx.HTTPError, ApiError) as cut:
                error = cut
            if trail.over:
                return
            time.sleep(trail.pause(error))

    def _read(self, trail: Trail[T]) -> Iterator[T]:
        with closing(self.http.send(trail.call.request(self.http, **trail.headers), stream=True)) as answer:
            if not answer.is_success:
                answer.read()
                raise error_of(answer)
            trail.begin()
            for event in EventSource(answer).iter_sse():
                yield from trail.take(event)
                if trail.over:
                    return


@dataclass(frozen=True)
class AsyncApi(Calls, AsyncCaller):
    """The asynchronous API: each call is awaitable."""

    http: httpx.AsyncClient
    patience: float

    async def do(self, call: Call[T]) -> T:
        """Return the response of a call. Retries as long as a retry is safe and may succeed."""
        tries = Tries(call)
        until = stop_before_delay(self.patience)
        again = AsyncRetrying(retry=retry_if_exception(tries.go_on), wait=pause, stop=until, reraise=True)

        async def once() -> T:
            return tries.read(await self.http.send(call.request(self.http)))

        return await again(once)

    async def follow(self, call: Call[T]) -> AsyncIterator[T]:
        """Yield the lines of a stream, over all its reconnects."""
        trail = Trail(call, self.patience)
        while True:
            error: Exception | None = None
            try:
                async with aclosing(self._read(trail)) as lines:
                    async for line in lines:
                        yield line
            except (httpx.HTTPError, ApiError) as cut:
                error = cut
            if trail.over:
                return
            await asyncio.sleep(trail.pause(error))

    async def _read(self, trail: Trail[T]) -> AsyncGenerator[T, None]:
        request = trail.call.request(self.http, **trail.headers)
        async with aclosing(await self.http.send(request, stream=True)) as answer:
            if not answer.is_success:
                await answer.aread()
                raise error_of(answer)
            trail.begin()
            async with aclosing(EventSource(answer).aiter_sse()) as events:
                async for event in events:
                    for line in trail.take(event):
                        yield line
                    if trail.over:
                        return
