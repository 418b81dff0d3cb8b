"""Position in a stream across reconnects: no line is lost or repeated."""

import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from httpx_sse import ServerSentEvent

from service.client.call import Call
from service.client.errors import may_pass
from service.client.retry import pause_after

T = TypeVar("T")
_CUT_SECONDS = 300.0
"""Minimum retry timeout of a stream once it has connected: the caller only follows the job and can wait."""


@dataclass
class Trail(Generic[T]):
    """A followed stream, and the position to resume from."""

    call: Call[T]
    patience: float
    """Retry timeout in seconds without a response."""
    over: bool = False
    _last_id: str = ""
    _tries: int = 0
    _heard: float = field(default_factory=time.monotonic)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that request the rest of the stream."""
        resume = {"Last-Event-ID": self._last_id} if self._last_id else {}
        return {"Accept": "text/event-stream", "Cache-Control": "no-store", **resume}

    def begin(self) -> None:
        """Record that the stream has connected, and extend the retry timeout."""
        self.patience = max(self.patience, _CUT_SECONDS)
        self._heard = time.monotonic()

    def take(self, event: ServerSentEvent) -> list[T]:
        """Record the position of an event, and return its line, if it has one."""
        self._heard = time.monotonic()
        self._last_id = event.id or self._last_id
        self.over = event.event == "end"
        if self.over or not event.data:
            return []
        self._tries = 0
        return [self.call.parse(event.data)]

    def pause(self, error: Exception | None = None) -> float:
        """Return the seconds until the next reconnect. Raises the error if it is permanent or after the timeout."""
        if error is not None and (not may_pass(error) or time.monotonic() - self._heard > self.patience):
            raise error
        self._tries += 1
        return pause_after(self._tries, error)
