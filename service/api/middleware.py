"""Middleware of every request: id, host check, metrics and log (ASGI)."""

import itertools
import re
import secrets
import time
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from service.api.problems import fault, problem
from service.errors import HostRefused, InvalidRequest, ServiceError
from service.ports import Metrics
from train_loop.spec import Problem

log = structlog.get_logger(__name__)
_REQUEST_ID = b"x-request-id"
_LONGEST_PATH = 256
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that probes and scrapers call every few seconds; logged at debug level."""


_PROCESS, _numbers = secrets.token_hex(9), itertools.count()


def _new_id() -> bytes:
    """Return a new id. A system call for random bytes would give the interpreter's lock away at each request."""
    return f"{_PROCESS}{next(_numbers):08x}".encode()


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
        request_id = sent if re.fullmatch(rb"[-\w.:]{1,64}", sent) else _new_id()
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
    """Middleware that rejects unknown Host headers, URLs that contain NUL, and bodies of two lengths (ASGI).

    The Host check blocks web pages that make a browser call loopback.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self.app = app
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or answer it with a problem."""
        refusal = self._refusal(scope, Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        answer = problem(refusal)
        # The next bytes of the connection may be the rest of this request.
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ServiceError | None:
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may believe the other length, and take a part of the body for another client's request.
            return InvalidRequest(
                [Problem("", "Transfer-Encoding and Content-Length are both given; send one of them")]
            )
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            # No resource name contains NUL, and some databases reject it.
            return InvalidRequest([Problem("", "the address holds a NUL character; leave it out")])
        host = headers.get("host", "")
        if _name(host) in self.hosts or _is_own_address(_name(host), scope):
            return None
        return HostRefused(f"Host {host!r} is not allowed; use localhost, or add it to TRAINSHED_ALLOWED_HOSTS")


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
    """Return the Host header without its port; all of it if it has another form."""
    found = _HOST.fullmatch(host)
    return host if found is None else found[1]


class RequestMetrics:
    """Middleware that counts and logs each request once its response starts, by route template (ASGI).

    It is on the path of every request, so it must cost only a few microseconds.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self._outage, self._refused = _EachSecond(), _EachSecond()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._record(scope, status, time.perf_counter() - began)
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except Exception:
            if not status:
                self._record(scope, 500, time.perf_counter() - began)
            raise

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # Only known routes and methods become labels: made-up paths must not create new series.
        route = getattr(scope.get("route"), "path", "(none)")
        method = scope["method"] if scope["method"] in _METHODS else "(other)"
        self.metrics.answered(method, route, status, seconds)
        emit, left_out = log.debug if route in _QUIET else log.info, {}
        if (limit := self._limit(scope, status)) is not None:
            if (count := limit.count()) is None:
                return
            left_out = {"left_out": count} if count else {}
        emit(
            "request",
            method=method,
            route=route,
            # The raw path: decoded, it may contain line breaks and imitate our log lines.
            path=scope["raw_path"][:_LONGEST_PATH].decode("latin-1"),
            status=status,
            ms=round(1000 * seconds, 1),
            key=scope["state"].get("key_id"),
            **left_out,
        )

    def _limit(self, scope: Scope, status: int) -> "_EachSecond | None":
        """Return the limit of the log lines of such answers; None to log each."""
        if scope["state"].get("outage"):
            return self._outage
        # Refused calls without a valid key have no other limit.
        return self._refused if status == 429 and "key_id" not in scope["state"] else None


class _EachSecond:
    """A limit of one log line per second: clients retry after a 503 or 429, and must not fill the log."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._left_out = 0

    def count(self) -> int | None:
        """Return the number of lines left out since the last one, or None to leave out this one too."""
        now = time.monotonic()
        if now - self._at < 1.0:
            self._left_out += 1
            return None
        self._at, left_out, self._left_out = now, self._left_out, 0
        return left_out
