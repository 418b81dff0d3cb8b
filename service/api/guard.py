"""Who may call: the Host header, the bearer key, and the size of what they send."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from fastapi.requests import HTTPConnection
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import problem
from service.errors import BodyTooLarge, HostRefused, InvalidRequest, Unauthorized
from train_loop.spec import Problem

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class Guard:
    """What the guards check against."""

    key_sha256: bytes
    max_body_bytes: int


def guard_of(request: HTTPConnection) -> Guard:
    """The guard of the app that serves this request."""
    guard: Guard = request.app.state.guard
    return guard


class KeyBearer(HTTPBearer):
    """The scheme `Authorization: Bearer KEY`, which refuses a caller without the key."""

    async def __call__(self, request: HTTPConnection) -> HTTPAuthorizationCredentials:
        """What was sent. Raises Unauthorized."""
        given = await super().__call__(request)
        if given is None:
            raise Unauthorized("no key was sent; add the header Authorization: Bearer KEY ($TRAINSHED_HOME/admin.key)")
        # Digests, so that the comparison takes the same time whatever was sent.
        if not hmac.compare_digest(hashlib.sha256(given.credentials.encode()).digest(), guard_of(request).key_sha256):
            raise Unauthorized("this key opens nothing; send the one line of $TRAINSHED_HOME/admin.key")
        return given


require_key = KeyBearer(auto_error=False, description="the one line of $TRAINSHED_HOME/admin.key")


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
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise InvalidRequest(
            [Problem("".join(f"/{part}" for part in e["loc"]), e["msg"]) for e in error.errors()]
        ) from error


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
