"""That the service is to end, in what time, and what its end waits for."""

import os
import threading

import structlog

log = structlog.get_logger(__name__)
SECONDS = 9.0
"""From being asked to stop until the process ends whatever hangs; ten are promised, one of them for the end itself."""
FORCED = 3
"""The exit code of a process that could not end in order."""
_LOG_SECONDS = 0.5


class Leaving(threading.Event):
    """Set once the service is to end: nobody may wait any more for those who follow a job.

    `more_seconds` are for jobs that save before embedded Ray is ended.
    """

    def __init__(self, *, more_seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = SECONDS + more_seconds

    waits_for = "answers that are being given"
    """What is being ended."""

    def begin(self) -> None:
        """Say that the service is to end, and end the process by force if it has not in time."""
        timer = threading.Timer(self._seconds, self.end_now, (FORCED, f"it did not end within {self._seconds:g} s"))
        timer.daemon = True
        timer.start()
        self.set()

    def end_now(self, code: int, why: str) -> None:
        """End the process at once, and say what was still waited for."""
        threads = [each.name for each in threading.enumerate() if not each.daemon and each.name != "MainThread"]
        told = {"why": why, "waited_for": self.waits_for, "threads": threads}
        # In a thread, because whoever reads the log may hang, too.
        thread = threading.Thread(target=log.error, args=("ended_by_force",), kwargs=told, daemon=True)
        thread.start()
        thread.join(_LOG_SECONDS)
        os._exit(code)
