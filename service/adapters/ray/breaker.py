"""A circuit breaker for the cluster: while it does not answer, calls fail at once and one thread probes it."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)
T = TypeVar("T")
SHORT, LONG = 1.25, 10.0
"""Timeouts of a call in seconds: the usual one, and the one for a cluster that was slow lately."""
_SLOW_FOR = 60.0
"""Seconds for which a cluster counts as slow after a late answer."""
_WORTH_IT = 1.0
"""Minimum seconds of a failed call that opens the breaker. A quicker failure (connection refused) delays no caller."""
_PAUSE = 1.0
"""Seconds between two probes."""
_FORGOTTEN = 60.0
"""Seconds without a call after which the probes end and the breaker closes."""


class ClusterSilentError(TimeoutError):
    """The error of a call that was rejected because the cluster has not answered lately."""


class Breaker:
    """A circuit breaker, which passes calls on while the cluster answers.

    In a network that drops packets, each call waits for its whole timeout. So a call that fails after a second or more
    opens the breaker. `probe` checks the cluster: it takes a timeout in seconds, and raises OSError without an answer.
    """

    def __init__(self, probe: Callable[[float], object]) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._silent_since: float | None = None
        self._slow_until = self._called = float("-inf")

    def call(self, call: Callable[[float], T], *, seconds: float | None = None) -> T:
        """Run `call` with a timeout: `seconds`, or the current default. Raises what `call` raises.

        Raises ClusterSilentError at once while the breaker is open.
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
        threading.Thread(target=self._probe_until_answered, name="cluster breaker", daemon=True).start()

    def _probe_until_answered(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._probe(LONG)
            except OSError:
                time.sleep(_PAUSE)
                with self._lock:
                    if time.monotonic() - self._called > _FORGOTTEN:
                        self._silent_since = None
                        return
                continue
            except Exception as error:  # an unexpected answer is an answer, and the next call reports it
                log.warning("cluster_probe_failed", error=f"{type(error).__name__}: {error}")
            now = time.monotonic()
            with self._lock:
                self._silent_since = None
                if now - began > SHORT:
                    self._slow_until = now + _SLOW_FOR
            return
