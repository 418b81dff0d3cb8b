"""Retry policy of calls: conditions and delays."""

import random
from dataclasses import dataclass
from http import HTTPStatus
from types import NoneType
from typing import Generic, TypeVar

import httpx
from tenacity import RetryCallState, wait_random_exponential

from service.client.call import Call
from service.client.errors import may_pass, was_kept_out, wished_pause

T = TypeVar("T")
_FIRST_SECONDS, _MOST_SECONDS = 0.2, 10.0
_backoff = wait_random_exponential(multiplier=_FIRST_SECONDS, max=_MOST_SECONDS)


@dataclass
class Tries(Generic[T]):
    """Retry state of one call."""

    call: Call[T]
    _maybe_done: bool = False
    """True if an earlier try may have taken effect although its response was lost."""

    def read(self, response: httpx.Response) -> T:
        """Return the parsed response. 404 is a success if an earlier DELETE may have succeeded. Raises as Call.read."""
        route = self.call.route
        deleted = self._maybe_done and route.method == "DELETE" and route.answer is NoneType
        if deleted and response.status_code == HTTPStatus.NOT_FOUND:
            return self.call.parse(b"null")
        return self.call.read(response)

    def go_on(self, error: BaseException) -> bool:
        """Return True if the call should be retried after this error."""
        kept_out = was_kept_out(error)
        self._maybe_done |= not kept_out
        return kept_out or (self.call.route.repeatable and may_pass(error))


def pause(state: RetryCallState) -> float:
    """Return the seconds until the next try: Retry-After if the service sent it, else random exponential backoff."""
    wished = wished_pause(state.outcome.exception() if state.outcome else None)
    return _backoff(state) if wished is None else wished


def pause_after(tries: int, error: Exception | None) -> float:
    """Return the seconds until a disconnected stream reconnects, by the same rule."""
    wished = wished_pause(error)
    return random.uniform(0, min(_MOST_SECONDS, _FIRST_SECONDS * 2 ** min(tries, 10))) if wished is None else wished
