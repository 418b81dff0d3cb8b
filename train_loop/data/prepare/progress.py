"""Progress of data preparation, reported in events."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from time import monotonic

from train_loop.data.prepare.fit import Fate
from train_loop.data.prepare.rows import locate
from train_loop.data.prepare.sources import SourceFile

Report = Callable[..., None]
"""Function that writes an event: its name, and its fields by keyword."""

_EVERY_SECONDS = 5.0
_LISTED = 100
"""Maximum number of bad rows to list; all are counted."""


class Progress:
    """Rows, tokens and bytes so far; `task_bytes` are the bytes that each task reads, in the order of their rows."""

    def __init__(self, report: Report, task_bytes: list[int]) -> None:
        self.rows = self.tokens = self.bad_rows = 0
        self.fates = Counter[Fate]()
        self._report = report
        self._before = [0, *accumulate(task_bytes)]
        self._listed: list[tuple[SourceFile, int, str]] = []
        self._started = self._reported_at = monotonic()

    def advance(self, rows: int, *, tokens: int, task: int, read: int) -> None:
        """Count rows of a task that has read `read` bytes so far; all earlier tasks have finished."""
        self.rows += rows
        self.tokens += tokens
        if monotonic() - self._reported_at >= _EVERY_SECONDS:
            self._report_progress(self._before[task] + read)

    def skipped(self, file: SourceFile, place: int, reason: str) -> None:
        """Count a row that cannot be trained on, and list it for `finish`."""
        self.bad_rows += 1
        if len(self._listed) < _LISTED:
            self._listed.append((file, place, reason))

    def fitted(self, fates: Iterable[Fate]) -> None:
        """Count the fates of documents."""
        self.fates.update(fates)

    @property
    def counts(self) -> dict[str, int]:
        """Row counts, as the fields of a Part."""
        fates = self.fates
        return {
            "rows": self.rows,
            "bad_rows": self.bad_rows,
            "long_rows": fates["long"] + fates["dropped"],
            "dropped_rows": fates["dropped"],
            "untrained_rows": fates["untrained"],
        }

    def finish(self) -> None:
        """Report the end of preparation, and the rows that were skipped."""
        self._report_progress(self._before[-1])
        if self.bad_rows:
            places = locate([(file, place) for file, place, _ in self._listed])
            rows = [f"{where}: {reason}" for where, (_, _, reason) in zip(places, self._listed, strict=True)]
            self._report("bad_rows_skipped", count=self.bad_rows, rows=rows)

    def _report_progress(self, done: int) -> None:
        self._reported_at = now = monotonic()
        total = max(self._before[-1], 1)
        left = (now - self._started) * (total - done) / done if done else None
        self._report(
            "prepare_progress",
            rows=self.rows,
            tokens=self.tokens,
            percent=round(100 * done / total, 1),
            eta_seconds=None if left is None else round(left),
        )
