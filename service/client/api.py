"""The REST API, call by call: one method for each, with its answer's model; for threads, and for event loops."""

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
    """Every call of the API. Each raises ApiError, or httpx.HTTPError where nobody answers."""


@dataclass(frozen=True)
class Api(Calls, Caller):
    """The calls, each of which returns its answer."""

    http: httpx.Client
    patience: float

    def do(self, call: Call[T]) -> T:
        """The answer of a call, which is tried again as long as that is safe and may help."""
        tries = Tries(call)
        until = stop_before_delay(self.patience)
        again = Retrying(retry=retry_if_exception(tries.go_on), wait=pause, stop=until, reraise=True)
        return again(lambda: tries.read(self.http.send(call.request(self.http))))

    def follow(self, call: Call[T]) -> Iterator[T]:
        """What a stream brings, over all its connections."""
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
    """The same calls, each of which is to be awaited."""

    http: httpx.AsyncClient
    patience: float

    async def do(self, call: Call[T]) -> T:
        """The answer of a call, which is tried again as long as that is safe and may help."""
        tries = Tries(call)
        until = stop_before_delay(self.patience)
        again = AsyncRetrying(retry=retry_if_exception(tries.go_on), wait=pause, stop=until, reraise=True)

        async def once() -> T:
            return tries.read(await self.http.send(call.request(self.http)))

        return await again(once)

    async def follow(self, call: Call[T]) -> AsyncIterator[T]:
        """What a stream brings, over all its connections."""
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
