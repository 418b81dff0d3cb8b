"""Asks no more of a cluster that does not answer: its callers fail at once, and one thread asks until it answers."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SHORT, LONG = 1.25, 10.0
"""Seconds to wait for an answer: usually, and of a cluster that was slow lately."""
_SLOW_FOR = 60.0
"""For so many seconds a cluster counts as slow after a late answer."""
_WORTH_IT = 1.0
"""A failure that took less, such as a refused connection, holds up nobody."""
_PAUSE = 1.0
"""Seconds between two tries of the thread."""
_FORGOTTEN = 60.0
"""The thread ends if nobody has asked for so many seconds."""


class ClusterSilentError(TimeoutError):
    """The cluster is not asked, because it has not answered lately."""


class Breaker:
    """Passes calls on to a cluster while it answers. `ask` takes the seconds to wait, and raises OSError if they pass.

    A network that drops packets keeps each call waiting for its whole timeout. One that took a second or more and
    failed opens the breaker.
    """

    def __init__(self, ask: Callable[[float], object]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._silent_since: float | None = None
        self._slow_until = self._called = float("-inf")

    def call(self, call: Callable[[float], T], *, seconds: float | None = None) -> T:
        """Call it with the seconds that it may take; raise what it raises.

        Raises ClusterSilentError at once while the cluster does not answer.
        """
        began = time.monotonic()
        with self._lock:
            self._called = began
            if self._silent_since is not None:
                raise ClusterSilentError(f"it has not answered for {began - self._silent_since:.0f} s")
            usual = LONG if began < self._slow_until else SHORT
        try:
            return call(usual if seconds is None else seconds)
        except OSError:
            if time.monotonic() - began >= _WORTH_IT:
                self._open(began)
            raise

    def _open(self, since: float) -> None:
        with self._lock:
            if self._silent_since is not None:
                return
            self._silent_since = since
        threading.Thread(target=self._ask_until_it_answers, name="cluster breaker", daemon=True).start()

    def _ask_until_it_answers(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._ask(LONG)
            except OSError:
                time.sleep(_PAUSE)
                with self._lock:
                    if time.monotonic() - self._called > _FORGOTTEN:
                        self._silent_since = None
                        return
                continue
            now = time.monotonic()
            with self._lock:
                self._silent_since = None
                if now - began > SHORT:
                    self._slow_until = now + _SLOW_FOR
            return
