"""Position in a stream across reconnects: no line is lost or repeated."""

from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

from httpx_sse import ServerSentEvent

from trainshed.call import Call
from trainshed.retry import delay_after, is_transient

T = TypeVar("T")
_CONNECTED_SECONDS = 300.0
"""Minimum retry timeout of a stream once it has connected: the caller only follows the job and can wait."""


@dataclass
class StreamCursor(Generic[T]):
    """A followed stream, and the position to resume from."""

    call: Call[T]
    retry_seconds: float
    """Retry timeout in seconds without a response."""
    ended: bool = False
    _last_id: str = ""
    _retries: int = 0
    _last_response: float = field(default_factory=monotonic)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that request the rest of the stream."""
        resume = {"Last-Event-ID": self._last_id} if self._last_id else {}
        return {"Accept": "text/event-stream", "Cache-Control": "no-store", **resume}

    def connected(self) -> None:
        """Record that the stream has connected, and extend the retry timeout."""
        self.retry_seconds = max(self.retry_seconds, _CONNECTED_SECONDS)
        self._last_response = monotonic()

    def advance(self, event: ServerSentEvent) -> list[T]:
        """Record the position of an event, and return its line, if it has one."""
        self._last_response = monotonic()
        self._last_id = event.id or self._last_id
        self.ended = event.event == "end"
        if self.ended or not event.data:
            return []
        self._retries = 0
        return [self.call.parse(event.data)]

    def delay(self, error: Exception | None = None) -> float:
        """Return the seconds until the next reconnect. Raises the error if it is permanent or after the timeout."""
        if error is not None and (not is_transient(error) or monotonic() - self._last_response > self.retry_seconds):
            raise error
        self._retries += 1
        return delay_after(error, self._retries)
