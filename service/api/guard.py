"""Request guards: Host header, bearer key or token, rate limits and body size."""

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

from service.api.problems import fault, problem
from service.api.query import check_query
from service.domain.access.oidc_claims import is_token
from service.domain.access.roles import OPERATOR, SCRAPER, Principal
from service.errors import BodyTooLarge, HostRefused, InvalidRequest, Unauthorized
from service.use_cases.access.access import Access
from service.use_cases.access.rate_limits import AuthAttempt, Kind, Rates
from train_loop.spec import Problem

T = TypeVar("T", bound=BaseModel)
_REQUEST_ID = b"x-request-id"
_TOKENS = 16
"""Maximum number of tokens verified concurrently; further ones wait."""


@dataclass(frozen=True)
class Guard:
    """Keys, rate limits and body size that the guards check against."""

    access: Access
    rates: Rates
    max_body_bytes: int
    token_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_TOKENS))


def guard_of(request: Request) -> Guard:
    """Return the guard of the app that serves this request."""
    guard: Guard = request.app.state.guard
    return guard


class KeyBearer(SecurityBase):
    """The scheme `Authorization: Bearer KEY`; it rejects invalid keys and tokens."""

    def __init__(self) -> None:
        self.model = HTTPBearer(
            description="a key, a token of TRAINSHED_OIDC_ISSUER, or the one line of $TRAINSHED_HOME/admin.key"
        )
        self.scheme_name = KeyBearer.__name__

    async def __call__(self, request: Request) -> Principal:
        """Return the caller that the key or token identifies, and check the query.

        Raises Unauthorized, Forbidden, RateLimited, IssuerUnavailable, InvalidRequest.
        """
        secret, guard = _secret(request), guard_of(request)
        caller = OPERATOR if guard.access.is_operator(secret) else await _let_in(guard, _attempt(request, secret))
        return await self._known(caller, request)

    @staticmethod
    async def _known(caller: Principal, request: Request) -> Principal:
        request.state.key_id = caller.id
        # Checked here: a separate FastAPI dependency would cost every submit as much again as this one.
        await check_query(request)
        return replace(caller, request_id=request.state.request_id)


class ScraperBearer(KeyBearer):
    """The scheme `Authorization: Bearer KEY` for /metrics; it also accepts the metrics key."""

    async def __call__(self, request: Request) -> Principal:
        """Return the caller that the key or token identifies. Raises the same errors as KeyBearer."""
        if guard_of(request).access.is_scraper(_secret(request)):
            return await self._known(SCRAPER, request)
        return await super().__call__(request)


def _secret(request: Request) -> str:
    scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
    return secret if scheme.lower() == "bearer" else ""


async def _let_in(guard: Guard, attempt: AuthAttempt) -> Principal:
    counted = guard.rates.check(attempt)
    try:
        caller = await _identify(guard, attempt.secret)
    except Unauthorized:
        guard.rates.record_failure(attempt)
        raise
    if not counted:
        guard.rates.record_success(attempt, caller)
    return caller


async def _identify(guard: Guard, secret: str) -> Principal:
    if not secret:
        raise Unauthorized("no key was sent; add the header Authorization: Bearer KEY ($TRAINSHED_HOME/admin.key)")
    # Tokens have separate threads: an unresponsive issuer delays only callers with its tokens.
    return await run_sync(guard.access.identify, secret, limiter=guard.token_threads if is_token(secret) else None)


def _attempt(request: Request, secret: str) -> AuthAttempt:
    kind = Kind.READS if request.method in ("GET", "HEAD") else Kind.WRITES
    return AuthAttempt(secret, request.client.host if request.client else "", kind)


require_key, require_scraper = KeyBearer(), ScraperBearer()
CallerIs = Annotated[Principal, Depends(require_key)]
ScraperIs = Annotated[Principal, Depends(require_scraper)]


async def read_body(request: Request) -> bytes:
    """Return the body. Count its size while reading: a chunked body does not declare it. Raises BodyTooLarge."""
    guard, parts, size = guard_of(request), list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > guard.max_body_bytes:
            raise BodyTooLarge(f"the body is over {guard.max_body_bytes} bytes; a job spec is text, send less of it")
        parts.append(part)
    return b"".join(parts)


def parse_body(kind: type[T], body: bytes) -> T:
    """Parse a body as a model; an empty body gives the defaults. Raises InvalidRequest."""
    try:
        # Strict: a string that looks like a number is not accepted as a number.
        return kind.model_validate_json(body or b"{}", strict=True)
    except ValidationError as error:
        raise InvalidRequest(
            [Problem("".join(f"/{part}" for part in e["loc"]), e["msg"]) for e in error.errors()]
        ) from error


class RequestIds:
    """Middleware that gives each request an id, in the response and in each log line (ASGI).

    It keeps the id that the client sent if that id is well-formed. It also answers unexpected errors of the inner app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        request_id = sent if re.fullmatch(rb"[-\w.:]{1,64}", sent) else secrets.token_hex(13).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        # Each request has a separate context, so this binding needs no cleanup.
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
            # Handled here: Starlette's error middleware is outside this one, and its response would lack the id.
            refusal = fault(error)
            if begun:
                raise
            await refusal(scope, receive, answer)


class HostCheck:
    """Middleware that rejects unknown Host headers and URLs that contain NUL (ASGI).

    The Host check blocks web pages that make a browser call loopback.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self.app = app
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or answer it with a problem."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else None
        if host is not None and ("\0" in scope["path"] or b"%00" in scope["query_string"]):
            # No resource name contains NUL, and some databases reject it.
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
    """Return True if the Host header is the address at which the request arrived. Pod probes and scrapers send it.

    A web page cannot make a browser send that: its requests carry the name of the page's site.
    """
    server = scope.get("server")
    if not server or server[1] is None:
        return False
    return _address(name) is not None and _address(name) == _address(server[0])


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        # Drop the interface of a link-local address.
        address = ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _name(host: str) -> str:
    """Return the Host header without its port."""
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
