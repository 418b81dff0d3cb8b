"""Declarations of REST calls. Each declares request and response once, and becomes a method of both clients."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter

from service.client.errors import error_of

P = ParamSpec("P")
T = TypeVar("T")
Query = Mapping[str, str | int | date | Sequence[str] | None]
# A submit checks data and model first, which may take long.
_SECONDS = 180.0
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Route(Generic[T]):
    """An operation of the API."""

    answer: type[T]
    method: str
    path: str
    """The path template, with parameter names in braces as in /openapi.json."""
    repeatable: bool = True
    """True if the call is idempotent. A POST that creates is idempotent if it sends an Idempotency-Key."""
    seconds: float | None = _SECONDS
    """Timeout in seconds, except for connecting; None means no timeout."""


@dataclass(frozen=True)
class Sent:
    """The request data of one call."""

    path: Mapping[str, str | int] = field(default_factory=dict)
    query: Query = field(default_factory=dict)
    body: BaseModel | str | bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call(Generic[T]):
    """An operation together with its request data."""

    route: Route[T]
    sent: Sent

    def request(self, http: httpx.Client | httpx.AsyncClient, **headers: str) -> httpx.Request:
        """Build the request. Each retry sends the same one."""
        route, sent = self.route, self.sent
        path = route.path.format_map({name: quote(str(value), safe="") for name, value in sent.path.items()})
        query = {name: str(v) if isinstance(v, date) else v for name, v in sent.query.items() if v not in (None, [])}
        body = sent.body.model_dump_json() if isinstance(sent.body, BaseModel) else sent.body
        timeout = httpx.Timeout(route.seconds, connect=_CONNECT_SECONDS)
        return http.build_request(
            route.method, path, params=query, content=body, headers={**sent.headers, **headers}, timeout=timeout
        )

    def read(self, response: httpx.Response) -> T:
        """Return the parsed response. Raises ApiError, or httpx.HTTPStatusError if the error is not from Trainshed."""
        if not response.is_success:
            raise error_of(response)
        return self.parse(response.content or b"null")

    def parse(self, content: bytes | str) -> T:
        """Parse a response, or one line of a stream, from JSON."""
        return TypeAdapter(self.route.answer).validate_json(content)


class Caller:
    """The base class of the synchronous API."""

    def do(self, call: Call[T]) -> T:
        """Return the response of a call."""
        raise NotImplementedError

    def follow(self, call: Call[T]) -> Iterator[T]:
        """Yield the lines of a stream until the job finishes."""
        raise NotImplementedError


class AsyncCaller:
    """The base class of the asynchronous API."""

    async def do(self, call: Call[T]) -> T:
        """Return the response of a call."""
        raise NotImplementedError

    def follow(self, call: Call[T]) -> AsyncIterator[T]:
        """Yield the lines of a stream until the job finishes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Operation(Generic[P, T]):
    """A method that makes a call; in an AsyncCaller it is awaitable."""

    route: Route[T]
    send: Callable[Concatenate[Any, P], Sent]

    @overload
    def __get__(self, caller: None, kind: type) -> "Operation[P, T]": ...
    @overload
    def __get__(self, caller: Caller, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, caller: AsyncCaller, kind: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, caller: Caller | AsyncCaller | None, kind: type) -> object:
        if caller is None:
            return self

        @functools.wraps(self.send)
        def call(*given: P.args, **named: P.kwargs) -> T | Awaitable[T]:
            return caller.do(Call(self.route, self.send(caller, *given, **named)))

        return call


@dataclass(frozen=True)
class Stream(Generic[P, T]):
    """A method that follows the output of a run; in an AsyncCaller it is an async iterator."""

    route: Route[T]
    send: Callable[Concatenate[Any, P], Sent]

    @overload
    def __get__(self, caller: None, kind: type) -> "Stream[P, T]": ...
    @overload
    def __get__(self, caller: Caller, kind: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, caller: AsyncCaller, kind: type) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, caller: Caller | AsyncCaller | None, kind: type) -> object:
        if caller is None:
            return self

        @functools.wraps(self.send)
        def follow(*given: P.args, **named: P.kwargs) -> Iterator[T] | AsyncIterator[T]:
            return caller.follow(Call(self.route, self.send(caller, *given, **named)))

        return follow


def operation(
    answer: type[T], method: str, path: str, *, repeatable: bool = True, seconds: float | None = _SECONDS
) -> Callable[[Callable[Concatenate[Any, P], Sent]], Operation[P, T]]:
    """Turn a function that returns the request data into a method that makes the call."""
    route = Route(answer, method, path, repeatable, seconds)
    return lambda send: Operation(route, send)


def stream(line: type[T], path: str) -> Callable[[Callable[Concatenate[Any, P], Sent]], Stream[P, T]]:
    """Turn a function that returns the request data into a method that follows a job."""
    # The service sends keep-alive comments four times as often.
    route = Route(line, "GET", path, seconds=60.0)
    return lambda send: Stream(route, send)
