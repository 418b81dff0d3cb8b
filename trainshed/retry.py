"""Retry policy of calls and streams: conditions and delays."""

import random
from dataclasses import dataclass, field
from http import HTTPStatus
from time import monotonic
from types import NoneType
from typing import Generic, TypeVar

import httpx

from trainshed.call import Call
from trainshed.errors import ApiError, retry_after_of

T = TypeVar("T")
_IN_FLIGHT = "idempotency_in_flight"
_TRANSIENT = frozenset(
    {
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
        HTTPStatus.INSUFFICIENT_STORAGE,
    }
)
_FIRST_SECONDS, _MOST_SECONDS = 0.2, 10.0


@dataclass
class Retry(Generic[T]):
    """Retry state of one call."""

    call: Call[T]
    retry_seconds: float
    """Time limit in seconds for the call and all its retries."""
    _began: float = field(default_factory=monotonic)
    _retries: int = 0
    _maybe_done: bool = False
    """True if an earlier try may have taken effect although its response was lost."""

    def read(self, response: httpx.Response) -> T:
        """Return the parsed response. 404 is a success if an earlier DELETE may have succeeded. Raises as Call.read."""
        call = self.call
        deleted = self._maybe_done and call.method == "DELETE" and call.response is NoneType
        if deleted and response.status_code == HTTPStatus.NOT_FOUND:
            return call.parse(b"null")
        return call.read(response)

    def should_retry(self, error: Exception) -> bool:
        """Return True if a retry is safe after this error, and may succeed."""
        not_processed = was_not_processed(error)
        self._maybe_done |= not not_processed
        return not_processed or (self.call.repeatable and is_transient(error))

    def delay(self, error: Exception) -> float:
        """Return the seconds until the next try. Raises the error if there is none, or not before the time limit."""
        if not self.should_retry(error):
            raise error
        seconds = delay_after(error, self._retries)
        if monotonic() - self._began + seconds >= self.retry_seconds:
            raise error
        self._retries += 1
        return seconds


def delay_after(error: Exception | None, retries: int) -> float:
    """Return the seconds of the response's Retry-After header. Without one, return a random exponential backoff."""
    wanted = retry_after(error)
    return random.uniform(0, min(_MOST_SECONDS, _FIRST_SECONDS * 2 ** min(retries, 10))) if wanted is None else wanted


def retry_after(error: Exception | None) -> float | None:
    """Return the seconds of the response's Retry-After header, or None."""
    if isinstance(error, httpx.HTTPStatusError):
        return retry_after_of(error.response)
    return error.retry_after if isinstance(error, ApiError) else None


def was_not_processed(error: Exception) -> bool:
    """Return True if the service cannot have processed the call: it never arrived, or was rate limited (429)."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return True
    return _status(error) == HTTPStatus.TOO_MANY_REQUESTS


def is_transient(error: Exception) -> bool:
    """Return True if a retry may succeed. The failed call may already have taken effect."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        # An error of the caller, although httpx classifies it as a transport error.
        return False
    if isinstance(error, ApiError) and error.code == _IN_FLIGHT:
        return True
    return isinstance(error, httpx.TransportError) or was_not_processed(error) or _status(error) in _TRANSIENT


def _status(error: Exception) -> int | None:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code
    return error.status if isinstance(error, ApiError) else None
