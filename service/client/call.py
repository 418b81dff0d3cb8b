"""A call of the REST API, declared once: what one declaration sends, how its answer is read, both clients' methods."""

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
# A submit looks at data and model first, which may take its time.
_SECONDS = 180.0
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Route(Generic[T]):
    """An operation of the API."""

    answer: type[T]
    method: str
    path: str
    """With the names of its parameters in braces, as /openapi.json has it."""
    repeatable: bool = True
    """Whether two of the same do what one does; a POST that creates is, by its Idempotency-Key."""
    seconds: float | None = _SECONDS
    """The longest silence that is no failure."""


@dataclass(frozen=True)
class Sent:
    """What one call sends."""

    path: Mapping[str, str | int] = field(default_factory=dict)
    query: Query = field(default_factory=dict)
    body: BaseModel | str | bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call(Generic[T]):
    """An operation with what is sent to it."""

    route: Route[T]
    sent: Sent

    def request(self, http: httpx.Client | httpx.AsyncClient, **headers: str) -> httpx.Request:
        """The same each time that it is made."""
        route, sent = self.route, self.sent
        path = route.path.format_map({name: quote(str(value), safe="") for name, value in sent.path.items()})
        query = {name: str(v) if isinstance(v, date) else v for name, v in sent.query.items() if v not in (None, [])}
        body = sent.body.model_dump_json() if isinstance(sent.body, BaseModel) else sent.body
        timeout = httpx.Timeout(route.seconds, connect=_CONNECT_SECONDS)
        return http.build_request(
            route.method, path, params=query, content=body, headers={**sent.headers, **headers}, timeout=timeout
        )

    def read(self, response: httpx.Response) -> T:
        """The answer. Raises ApiError, or httpx.HTTPStatusError where it was somebody else who answered."""
        if not response.is_success:
            raise error_of(response)
        return self.parse(response.content or b"null")

    def parse(self, content: bytes | str) -> T:
        """An answer, or one of many, from its JSON."""
        return TypeAdapter(self.route.answer).validate_json(content)


class Caller:
    """What makes calls, and waits for their answers."""

    def do(self, call: Call[T]) -> T:
        """The answer of a call."""
        raise NotImplementedError

    def follow(self, call: Call[T]) -> Iterator[T]:
        """What comes, one by one, until its job has ended."""
        raise NotImplementedError


class AsyncCaller:
    """What makes calls without waiting for their answers."""

    async def do(self, call: Call[T]) -> T:
        """The answer of a call."""
        raise NotImplementedError

    def follow(self, call: Call[T]) -> AsyncIterator[T]:
        """What comes, one by one, until its job has ended."""
        raise NotImplementedError


@dataclass(frozen=True)
class Operation(Generic[P, T]):
    """A method that makes a call; in an AsyncCaller it is to be awaited."""

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
    """A method that follows what a run writes; in an AsyncCaller it is for `async for`."""

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
    """Make a function that says what is sent into a call."""
    route = Route(answer, method, path, repeatable, seconds)
    return lambda send: Operation(route, send)


def stream(line: type[T], path: str) -> Callable[[Callable[Concatenate[Any, P], Sent]], Stream[P, T]]:
    """Make a function that says what is sent into one that follows a job."""
    # The service says that it is still there four times as often.
    route = Route(line, "GET", path, seconds=60.0)
    return lambda send: Stream(route, send)
