"""Lines of a driver's log for people: without tracebacks, and with the reason of a failed job first."""

import re

from service.api.schemas import JobOut
from service.domain.jobs.job import JobState
from trainshed.cli.output.printing import show_text

_RECORD = re.compile(r"\d{4}-\d\d-\d\d[T ][\d:.,]+Z? +\[?[A-Za-z]+")
"""Start of a log record: its time and level."""
_TRACEBACK = re.compile(r"(Traceback \(most recent call last\):|ray\.exceptions\.\w+|ray::)")
"""Start of a traceback below a record."""
_ADVICE = re.compile(r"open an issue on|Full stack trace|abbreviated stack trace")
"""Text in records in which Ray reports an error that the driver reports, too."""


class TracebackFilter:
    """A filter that leaves out tracebacks and Ray's reports about its own code, and counts the lines."""

    def __init__(self) -> None:
        self.left_out = 0
        self._hides = False

    def keeps(self, line: str) -> bool:
        """Return whether to show the next line of the log."""
        if _RECORD.match(line):
            self._hides = _ADVICE.search(line) is not None
        elif _TRACEBACK.match(line):
            self._hides = True
        self.left_out += self._hides
        return not self._hides


def show_failure(job: JobOut) -> None:
    """Print code, message and remedy of a failed job; nothing for other jobs."""
    if job.state is not JobState.FAILED or job.reason is None:
        return
    show_text(f"{job.id} FAILED: {job.reason.code}: {job.reason.message}")
    if job.reason.remedy:
        show_text(f"what helps: {job.reason.remedy}")
    show_text("")
