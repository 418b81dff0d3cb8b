"""How far preparing has come, told in events."""

from collections.abc import Callable
from itertools import accumulate
from time import monotonic

Report = Callable[..., None]
"""Writes an event: its name, and its fields by keyword."""

_EVERY_SECONDS = 5.0
_LISTED = 100
"""Bad rows that are listed; all are counted."""


class Progress:
    """Rows, tokens and bytes so far; `task_bytes` are what each task reads, in the order in which their rows come."""

    def __init__(self, report: Report, task_bytes: list[int]) -> None:
        self.bad_rows = 0
        self._report = report
        self._before = [0, *accumulate(task_bytes)]
        self._rows = self._tokens = 0
        self._listed: list[str] = []
        self._started = self._told = monotonic()

    def rows(self, count: int, *, tokens: int, task: int) -> None:
        """Some rows of a task, all earlier tasks being done."""
        self._rows += count
        self._tokens += tokens
        now = monotonic()
        if now - self._told >= _EVERY_SECONDS:
            self._told = now
            done, total = self._before[task], self._before[-1]
            left = (now - self._started) * (total - done) / done if done else None
            self._report(
                "prepare_progress",
                rows=self._rows,
                tokens=self._tokens,
                percent=round(100 * done / total, 1),
                eta_seconds=None if left is None else round(left),
            )

    def skipped(self, where: Callable[[], str], reason: str) -> None:
        """A row that cannot be trained on; `where` may have to read the file again."""
        self.bad_rows += 1
        if len(self._listed) < _LISTED:
            self._listed.append(f"{where()}: {reason}")

    def finish(self) -> None:
        """Tell what was left out."""
        if self.bad_rows:
            self._report("bad_rows_skipped", count=self.bad_rows, rows=self._listed)
