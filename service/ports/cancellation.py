"""Cancellation of a call whose client has gone."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallCancelled(Exception):
    """The client of a call has gone; nobody reads its answer."""


class Cancellation:
    """The request to end a call early. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._end: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Cancel the call, and end what works for it."""
        with self._lock:
            self._cancelled = True
            if self._end is not None:
                self._end()

    def check(self) -> None:
        """Raise CallCancelled if the call is cancelled."""
        if self._cancelled:
            raise CallCancelled

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` if the call is cancelled before the block exits, and raise CallCancelled then."""
        with self._lock:
            self._end = end
            if self._cancelled:
                end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None
            self.check()
