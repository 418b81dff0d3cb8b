"""What a run tells the world: events and metrics in the run directory, written by rank 0 or the driver."""

import logging
from typing import Any

from train_loop.run_dir import AttemptDir, JsonLines

log = logging.getLogger(__name__)


class Journal:
    """events.jsonl and metrics.jsonl of an attempt; silent on every rank but 0."""

    def __init__(self, attempt: AttemptDir, *, rank: int = 0) -> None:
        self._events = JsonLines(attempt.events, attempt=attempt.number)
        self._metrics = JsonLines(attempt.metrics, attempt=attempt.number)
        self._speaks = rank == 0

    def event(self, name: str, **fields: Any) -> None:
        """Say that something happened."""
        if self._speaks:
            self._events.append(event=name, **fields)

    def warn(self, message: str) -> None:
        """Say, in the log too, what the user should know although the run goes on."""
        if self._speaks:
            log.warning(message)
            self.event("warning", message=message)

    def metrics(self, **fields: Any) -> None:
        """Write one optimizer step's numbers."""
        if self._speaks:
            self._metrics.append(**fields)
