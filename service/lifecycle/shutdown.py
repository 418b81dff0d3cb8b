"""Shutdown of the service, with a deadline after which the process is killed."""

import os
import threading

import structlog

log = structlog.get_logger(__name__)
SECONDS = 9.0
"""Time from the stop signal until a forced exit. The documented limit is ten seconds; one is for the exit itself."""
FORCED = 3
"""Exit code of a forced exit."""
_LOG_SECONDS = 0.5


class Shutdown(threading.Event):
    """An event that is set once the service shuts down: streams then end.

    `more_seconds` is extra time for jobs to save before embedded Ray stops.
    """

    def __init__(self, *, more_seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = SECONDS + more_seconds

    waits_for = "in-flight requests"
    """The part whose stop the shutdown waits for."""

    def begin(self) -> None:
        """Begin the shutdown, and force an exit if it exceeds its deadline."""
        timer = threading.Timer(
            self._seconds, self.end_now, (FORCED, f"the service did not stop within {self._seconds:g} s")
        )
        timer.daemon = True
        timer.start()
        self.set()

    def end_now(self, code: int, why: str) -> None:
        """Exit the process at once, and log the part that it was waiting for."""
        threads = [each.name for each in threading.enumerate() if not each.daemon and each.name != "MainThread"]
        fields = {"why": why, "waited_for": self.waits_for, "threads": threads}
        # In a thread, because the reader of the log may hang too.
        thread = threading.Thread(target=log.error, args=("ended_by_force",), kwargs=fields, daemon=True)
        thread.start()
        thread.join(_LOG_SECONDS)
        os._exit(code)
