"""Who may call: the Host header, the bearer key, and the size of what they send."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from service.access import Access
from service.api.problems import fault, problem
from service.api.query import check_query
from service.domain.access import OPERATOR, Caller
from service.errors import BodyTooLarge, HostRefused, InvalidRequest, Unauthorized
from train_loop.spec import Problem

T = TypeVar("T", bound=BaseModel)
_REQUEST_ID = b"x-request-id"


@dataclass(frozen=True)
class Guard:
    """What the guards check against."""

    access: Access
    max_body_bytes: int


def guard_of(request: Request) -> Guard:
    """The guard of the app that serves this request."""
    guard: Guard = request.app.state.guard
    return guard


class KeyBearer(SecurityBase):
    """The scheme `Authorization: Bearer KEY`, which refuses a caller without a key that opens anything."""

    def __init__(self) -> None:
        self.model = HTTPBearer(description="a key of one's own, or the one line of $TRAINSHED_HOME/admin.key")
        self.scheme_name = type(self).__name__

    async def __call__(self, request: Request) -> Caller:
        """Whose key was sent; the query is looked at, too. Raises Unauthorized, InvalidRequest."""
        scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized("no key was sent; add the header Authorization: Bearer KEY ($TRAINSHED_HOME/admin.key)")
        access = guard_of(request).access
        caller = OPERATOR if access.is_operator(secret) else await run_in_threadpool(access.identify, secret)
        if caller is None:
            raise Unauthorized(
                "this key opens nothing, or not any more; send the one line of $TRAINSHED_HOME/admin.key, or ask an "
                "admin of your project for a key"
            )
        request.state.key_id = caller.id
        # Here, because a dependency of its own costs every submit as much as this one does.
        await check_query(request)
        return replace(caller, request_id=request.state.request_id)


require_key = KeyBearer()
CallerIs = Annotated[Caller, Depends(require_key)]


async def read_body(request: Request) -> bytes:
    """The body, counted while it is read, because a chunked one does not say its size. Raises BodyTooLarge."""
    guard, parts, size = guard_of(request), list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > guard.max_body_bytes:
            raise BodyTooLarge(f"the body is over {guard.max_body_bytes} bytes; a job spec is text, send less of it")
        parts.append(part)
    return b"".join(parts)


def parse_body(kind: type[T], body: bytes) -> T:
    """A body as a model; an empty one has all its defaults. Raises InvalidRequest."""
    try:
        # Strictly: what is said to be a number is no text that looks like one.
        return kind.model_validate_json(body or b"{}", strict=True)
    except ValidationError as error:
        raise InvalidRequest(
            [Problem("".join(f"/{part}" for part in e["loc"]), e["msg"]) for e in error.errors()]
        ) from error


class RequestIds:
    """Gives every request an id, the caller's own if it sent a plain one: in the answer and in each log line (ASGI).

    Faults of all that is behind it are answered here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        request_id = sent if re.fullmatch(rb"[-\w.:]{1,64}", sent) else secrets.token_hex(13).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        # A request has a context of its own: nobody sees it afterwards.
        bind_contextvars(request_id=request_id.decode())

        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], (_REQUEST_ID, request_id)]
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except Exception as error:
            # Here, because what Starlette has for faults sits outside: its answer would go without the id.
            refusal = fault(error)
            if begun:
                raise
            await refusal(scope, receive, answer)


class HostCheck:
    """Refuses requests whose Host header is none of ours, and addresses that can be none of ours (ASGI).

    A page in a browser can be made to call loopback.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self.app = app
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a problem."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else None
        if host is not None and ("\0" in scope["path"] or b"%00" in scope["query_string"]):
            # No name has one, and not every database takes one.
            await problem(InvalidRequest([Problem("", "the address holds a NUL character; leave it out")]))(
                scope, receive, send
            )
            return
        if host is None or _name(host) in self.hosts:
            await self.app(scope, receive, send)
            return
        refused = HostRefused(f"Host {host!r} is not allowed; use localhost, or add it to TRAINSHED_ALLOWED_HOSTS")
        await problem(refused)(scope, receive, send)


def _name(host: str) -> str:
    """The Host header without its port."""
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
