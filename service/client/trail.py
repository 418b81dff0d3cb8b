"""How far a stream was read, over all its connections: nothing twice, nothing left out."""

import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from httpx_sse import ServerSentEvent

from service.client.call import Call
from service.client.errors import may_pass
from service.client.retry import pause_after

T = TypeVar("T")
_CUT_SECONDS = 300.0
"""How long a stream that was heard is tried again at least: whoever follows a job has nothing else to do."""


@dataclass
class Trail(Generic[T]):
    """What is followed, and where to go on."""

    call: Call[T]
    patience: float
    """Seconds that it is tried in vain."""
    over: bool = False
    _last_id: str = ""
    _tries: int = 0
    _heard: float = field(default_factory=time.monotonic)

    @property
    def headers(self) -> dict[str, str]:
        """What asks for the rest."""
        resume = {"Last-Event-ID": self._last_id} if self._last_id else {}
        return {"Accept": "text/event-stream", "Cache-Control": "no-store", **resume}

    def begin(self) -> None:
        """Somebody answers."""
        self.patience = max(self.patience, _CUT_SECONDS)
        self._heard = time.monotonic()

    def take(self, event: ServerSentEvent) -> list[T]:
        """What an event brings: one line, or none."""
        self._heard = time.monotonic()
        self._last_id = event.id or self._last_id
        self.over = event.event == "end"
        if self.over or not event.data:
            return []
        self._tries = 0
        return [self.call.parse(event.data)]

    def pause(self, error: Exception | None = None) -> float:
        """Seconds until it is taken up again. Raises the error where that is no use, or patience has ended."""
        if error is not None and (not may_pass(error) or time.monotonic() - self._heard > self.patience):
            raise error
        self._tries += 1
        return pause_after(self._tries, error)
