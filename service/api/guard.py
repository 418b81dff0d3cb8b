"""Who may call: the Host header, the bearer key or token, how often, and the size of what they send."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from service.access import Access
from service.api.problems import fault, problem
from service.api.query import check_query
from service.domain.access import OPERATOR, SCRAPER, Caller
from service.domain.token import is_token
from service.errors import BodyTooLarge, HostRefused, InvalidRequest, Unauthorized
from service.rates import Attempt, Kind, Rates
from train_loop.spec import Problem

T = TypeVar("T", bound=BaseModel)
_REQUEST_ID = b"x-request-id"
_TOKENS = 16
"""Tokens that are checked at once; more of them wait."""


@dataclass(frozen=True)
class Guard:
    """What the guards check against."""

    access: Access
    rates: Rates
    max_body_bytes: int
    token_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_TOKENS))


def guard_of(request: Request) -> Guard:
    """The guard of the app that serves this request."""
    guard: Guard = request.app.state.guard
    return guard


class KeyBearer(SecurityBase):
    """The scheme `Authorization: Bearer KEY`, which refuses a caller whose key or token opens nothing."""

    def __init__(self) -> None:
        self.model = HTTPBearer(
            description="a key, a token of TRAINSHED_OIDC_ISSUER, or the one line of $TRAINSHED_HOME/admin.key"
        )
        self.scheme_name = KeyBearer.__name__

    async def __call__(self, request: Request) -> Caller:
        """Whose key or token was sent; the query is looked at, too.

        Raises Unauthorized, RateLimited, IssuerUnavailable, InvalidRequest.
        """
        secret, guard = _secret(request), guard_of(request)
        caller = OPERATOR if guard.access.is_operator(secret) else await _let_in(guard, _attempt(request, secret))
        return await self._known(caller, request)

    @staticmethod
    async def _known(caller: Caller, request: Request) -> Caller:
        request.state.key_id = caller.id
        # Here, because a dependency of its own costs every submit as much as this one does.
        await check_query(request)
        return replace(caller, request_id=request.state.request_id)


class ScraperBearer(KeyBearer):
    """The same, which also takes the key that opens the metrics alone."""

    async def __call__(self, request: Request) -> Caller:
        """Whose key or token was sent. Raises what KeyBearer raises."""
        if guard_of(request).access.is_scraper(_secret(request)):
            return await self._known(SCRAPER, request)
        return await super().__call__(request)


def _secret(request: Request) -> str:
    scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
    return secret if scheme.lower() == "bearer" else ""


async def _let_in(guard: Guard, attempt: Attempt) -> Caller:
    counted = guard.rates.admit(attempt)
    try:
        caller = await _identify(guard, attempt.secret)
    except Unauthorized:
        guard.rates.turned_away(attempt)
        raise
    if not counted:
        guard.rates.let_in(attempt, caller)
    return caller


async def _identify(guard: Guard, secret: str) -> Caller:
    if not secret:
        raise Unauthorized("no key was sent; add the header Authorization: Bearer KEY ($TRAINSHED_HOME/admin.key)")
    # An issuer that does not answer holds up nobody but those with its tokens.
    return await run_sync(guard.access.identify, secret, limiter=guard.token_threads if is_token(secret) else None)


def _attempt(request: Request, secret: str) -> Attempt:
    kind = Kind.READS if request.method in ("GET", "HEAD") else Kind.WRITES
    return Attempt(secret, request.client.host if request.client else "", kind)


require_key, require_scraper = KeyBearer(), ScraperBearer()
CallerIs = Annotated[Caller, Depends(require_key)]
ScraperIs = Annotated[Caller, Depends(require_scraper)]


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
        if host is None or _name(host) in self.hosts or _is_own_address(_name(host), scope):
            await self.app(scope, receive, send)
            return
        refused = HostRefused(f"Host {host!r} is not allowed; use localhost, or add it to TRAINSHED_ALLOWED_HOSTS")
        await problem(refused)(scope, receive, send)


def _is_own_address(name: str, scope: Scope) -> bool:
    """Return whether a request names the address at which it arrived, as probes and scrapers of pods do.

    No page in a browser can be made to send that: its own requests carry the name of its site.
    """
    server = scope.get("server")
    if not server or server[1] is None:
        return False
    return _address(name) is not None and _address(name) == _address(server[0])


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        # Of a link-local address without its interface.
        address = ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _name(host: str) -> str:
    """The Host header without its port."""
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
