"""How often a call is tried, and when: what a try that failed means for the next one."""

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
    """One call over all its tries."""

    call: Call[T]
    _maybe_done: bool = False
    """Whether a try before this one may have done what was asked, and its answer was lost."""

    def read(self, response: httpx.Response) -> T:
        """The answer; that a thing is gone is what whoever has deleted it expects. Raises as Call.read."""
        route = self.call.route
        deleted = self._maybe_done and route.method == "DELETE" and route.answer is NoneType
        if deleted and response.status_code == HTTPStatus.NOT_FOUND:
            return self.call.parse(b"null")
        return self.call.read(response)

    def go_on(self, error: BaseException) -> bool:
        """Whether to try again after an error."""
        kept_out = was_kept_out(error)
        self._maybe_done |= not kept_out
        return kept_out or (self.call.route.repeatable and may_pass(error))


def pause(state: RetryCallState) -> float:
    """Seconds until the next try: what the service asks for, otherwise more each time, and never as others do."""
    wished = wished_pause(state.outcome.exception() if state.outcome else None)
    return _backoff(state) if wished is None else wished


def pause_after(tries: int, error: Exception | None) -> float:
    """The same, for a stream that was cut."""
    wished = wished_pause(error)
    return random.uniform(0, min(_MOST_SECONDS, _FIRST_SECONDS * 2 ** min(tries, 10))) if wished is None else wished
