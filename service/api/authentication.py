"""Authentication of requests: bearer key or token, and rate limits."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers

from service.api.query_parameters import check_query
from service.domain.access.oidc_claims import is_token
from service.domain.access.roles import OPERATOR, SCRAPER, Principal
from service.errors import Unauthorized
from service.use_cases.access.access import Access
from service.use_cases.access.rate_limits import AuthAttempt, Kind, Rates

_TOKENS = 16
"""Maximum number of tokens verified concurrently; further ones wait."""


@dataclass(frozen=True)
class Guard:
    """Keys, rate limits and body size that the guards check against."""

    access: Access
    rates: Rates
    max_body_bytes: int
    token_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_TOKENS))

    def knows(self, secret: str) -> bool:
        """Return whether a secret is known to be valid, without a look at the database."""
        return self.rates.knows(secret) or self.access.is_operator(secret) or self.access.is_scraper(secret)


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
        secret, guard = secret_of(request.headers), guard_of(request)
        caller = OPERATOR if guard.access.is_operator(secret) else await _let_in(request, secret)
        return await self._known(caller, request)

    @staticmethod
    async def _known(caller: Principal, request: Request) -> Principal:
        request.state.key_id = caller.id
        # Checked here: a separate FastAPI dependency would cost every submit as much again as this one.
        await check_query(request)
        known = request.state.caller = replace(caller, request_id=request.state.request_id)
        return known


def caller_of(request: Request) -> Principal:
    """Return the caller of a route below a router with `require_key`, which has run before the route."""
    caller: Principal = request.state.caller
    return caller


class ScraperBearer(KeyBearer):
    """The scheme `Authorization: Bearer KEY` for /metrics; it also accepts the metrics key."""

    async def __call__(self, request: Request) -> Principal:
        """Return the caller that the key or token identifies. Raises the same errors as KeyBearer."""
        if guard_of(request).access.is_scraper(secret_of(request.headers)):
            return await self._known(SCRAPER, request)
        return await super().__call__(request)


def secret_of(headers: Headers) -> str:
    """Return the key or token of a request; empty if it has none."""
    scheme, secret = get_authorization_scheme_param(headers.get("authorization"))
    return secret if scheme.lower() == "bearer" else ""


async def _let_in(request: Request, secret: str) -> Principal:
    guard, attempt = guard_of(request), _attempt(request, secret)
    counted = guard.rates.check(attempt)
    try:
        caller = await _identify(guard, attempt.secret)
    except Unauthorized:
        guard.rates.record_failure(attempt)
        request.state.counted = True
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
