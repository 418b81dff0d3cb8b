"""Warnings that repeat while something is broken, limited to one line per interval."""

import logging
import threading
import time
from collections.abc import Callable


class LimitedLog:
    """A logger of warnings that writes each message at most once per `seconds`, whatever its arguments."""

    def __init__(
        self, log: logging.Logger, *, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warning(self, message: str, *arguments: object) -> None:
        """Log a warning, unless the same message was logged less than `seconds` ago."""
        with self._lock:
            now = self._clock()
            if now < self._next.get(message, now):
                self._suppressed[message] = self._suppressed.get(message, 0) + 1
                return
            self._next[message] = now + self._seconds
            suppressed = self._suppressed.pop(message, 0)
        more = f" ({suppressed} more like this)" if suppressed else ""
        self._log.warning(message + more, *arguments)
