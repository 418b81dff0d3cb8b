"""A TokenVerifier for an OpenID Connect issuer, which checks tokens against the issuer's published keys."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio
import httpx
import jwt
from pydantic import BaseModel, JsonValue

from service.domain.access.oidc_claims import LEEWAY, Claims, tamper_proof
from service.errors import IssuerUnavailable, Unauthorized

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Algorithms with a public key. With a symmetric key, every verifier could forge tokens."""
_LIMIT, _MOST_BYTES = 5.0, 1 << 20
"""Limits: seconds of a whole fetch, and bytes of each answer."""
_FRESH, _GOOD = 300.0, 3600.0
"""Seconds after which keys are fetched again, and after which they expire if the issuer sends no newer ones."""
_PAUSE = 10.0
"""Minimum seconds between two fetches, whatever tokens arrive."""

_WAIT, _MOST_WAITING = 2.0, 2
"""Seconds for which a token waits for a fetch, and maximum number of tokens of unknown keys that wait at once."""
_ABSENT, _MOST_ABSENT = 30.0, 1024
"""Seconds for which an unknown id of a key is rejected without a fetch, and maximum number of such ids."""

Keys = Mapping[str, jwt.PyJWK]


class _Discovery(BaseModel):
    issuer: str
    jwks_uri: str


class _Published(BaseModel):
    keys: list[dict[str, JsonValue]]


@dataclass(frozen=True)
class _Fetched:
    """Keys by id, and the time at which they were fetched."""

    keys: Keys
    at: float


class OidcVerifier:
    """A verifier of the signature, issuer, audience and times of tokens. It fetches the issuer's keys on demand."""

    def __init__(self, issuer: str, audience: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer, self._audience, self._clock = issuer, audience, clock
        self._found = _Fetched({}, -_GOOD)
        self._tried_at, self._failure = -_PAUSE, ""
        self._absent: dict[str, float] = {}
        """Ids of keys that the issuer does not have, and until when that is remembered."""
        self._lock, self._waiting = threading.Lock(), threading.Semaphore(_MOST_WAITING)
        self._fetch_ended = threading.Event()
        self._fetch_ended.set()

    def verify(self, token: str) -> Claims:
        """Return the claims of a token.

        Raises Unauthorized if it is invalid, IssuerUnavailable if the issuer's keys are not available.
        """
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            return dict(
                jwt.decode(
                    token,
                    key,
                    algorithms=_ALGORITHMS,
                    audience=self._audience,
                    issuer=self._issuer,
                    leeway=LEEWAY,
                    options={"require": ["exp", "iss", "aud", "sub"]},
                )
            )
        except (jwt.InvalidTokenError, jwt.InvalidKeyError) as error:
            raise Unauthorized(f"invalid token ({error}); get a new one from {self._issuer}") from error

    def _key(self, kid: str | None) -> jwt.PyJWK:
        """Return the key with this id.

        Raises jwt.InvalidKeyError if the issuer has no such key, IssuerUnavailable if its keys are not available.
        """
        if kid is None:
            raise jwt.InvalidKeyError("its header has no key id, kid")
        found, now = self._found, self._clock()
        if kid not in found.keys or now - found.at >= _FRESH:
            found = self._refreshed(kid, found, now)
        if kid not in found.keys:
            raise jwt.InvalidKeyError("its key id, kid, is not among the issuer's keys")
        return found.keys[kid]

    def _refreshed(self, kid: str, found: _Fetched, now: float) -> _Fetched:
        """Return the keys after a fetch, for which only callers without a usable key wait, and not for long.

        Raises IssuerUnavailable.
        """
        if kid not in found.keys and self._absent.get(kid, now) > now:
            return found
        fetch = self._start_fetch(now)
        if kid not in found.keys or now - found.at >= _GOOD:
            self._wait(fetch, crowded=bool(found.keys))
        found, pending = self._found, not fetch.is_set()
        if self._clock() - found.at >= _GOOD or (kid not in found.keys and (pending or self._failure)):
            raise IssuerUnavailable(self._failure or "the request is in progress", 1 if pending else self._pause())
        if kid not in found.keys:
            self._remember_absent(kid)
        return found

    def _remember_absent(self, kid: str) -> None:
        with self._lock:
            if len(self._absent) >= _MOST_ABSENT:
                del self._absent[next(iter(self._absent))]
            self._absent[kid] = self._clock() + _ABSENT

    def _start_fetch(self, now: float) -> threading.Event:
        """Fetch the keys in a thread, unless the last fetch is too recent; return the event of the last fetch's end."""
        with self._lock:
            if self._fetch_ended.is_set() and now - self._tried_at >= _PAUSE:
                self._tried_at, self._fetch_ended = now, threading.Event()
                threading.Thread(target=self._run_fetch, args=(self._fetch_ended, now), daemon=True).start()
            return self._fetch_ended

    def _wait(self, fetch: threading.Event, *, crowded: bool) -> None:
        """Wait for a fetch. Tokens of unknown keys take few threads, so that other tokens are verified meanwhile."""
        if not crowded:
            fetch.wait(_WAIT)
        elif not fetch.is_set() and self._waiting.acquire(blocking=False):
            try:
                fetch.wait(_WAIT)
            finally:
                self._waiting.release()

    def _run_fetch(self, ended: threading.Event, now: float) -> None:
        try:
            self._found, self._failure = _Fetched(anyio.run(self._fetch), now), ""
        except (httpx.HTTPError, httpx.InvalidURL, jwt.PyJWTError, ValueError, TimeoutError) as error:
            self._failure = f"{type(error).__name__}: {self._issuer}"
        finally:
            ended.set()

    def _pause(self) -> int:
        return max(1, int(self._tried_at + _PAUSE - self._clock()) + 1)

    async def _fetch(self) -> Keys:
        """Fetch the issuer's current keys. Raises httpx.HTTPError, jwt.PyJWTError, ValueError, TimeoutError."""
        with anyio.fail_after(_LIMIT):
            async with httpx.AsyncClient(headers={"Accept-Encoding": "identity"}, timeout=_LIMIT) as client:
                url = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
                discovery = _Discovery.model_validate_json(await _get(client, url))
                if discovery.issuer != self._issuer:
                    raise ValueError("the discovery document contains another issuer")
                if not tamper_proof(discovery.jwks_uri):
                    raise ValueError("its jwks_uri is not https")
                published = _Published.model_validate_json(await _get(client, discovery.jwks_uri))
        # Leave out keys for encryption, and published symmetric keys: tokens must not be verified with them.
        usable = (key for key in jwt.PyJWKSet(published.keys).keys if key.algorithm_name in _ALGORITHMS)
        return {key.key_id: key for key in usable if key.key_id and key.public_key_use in (None, "sig")}


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    """Return the body of an answer. Raises httpx.HTTPError for a redirect or an error, ValueError for a long body."""
    body = b""
    async with client.stream("GET", url) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            body += part
            if len(body) > _MOST_BYTES:
                raise ValueError(f"the response exceeds {_MOST_BYTES} bytes")
    return body
