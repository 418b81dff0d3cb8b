"""How far preparing has come, told in events."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from time import monotonic

from train_loop.data.prepare.fit import Fate
from train_loop.data.prepare.rows import locate
from train_loop.data.prepare.sources import SourceFile

Report = Callable[..., None]
"""Writes an event: its name, and its fields by keyword."""

_EVERY_SECONDS = 5.0
_LISTED = 100
"""Bad rows that are listed; all are counted."""


class Progress:
    """Rows, tokens and bytes so far; `task_bytes` are what each task reads, in the order in which their rows come."""

    def __init__(self, report: Report, task_bytes: list[int]) -> None:
        self.rows = self.tokens = self.bad_rows = 0
        self.fates = Counter[Fate]()
        self._report = report
        self._before = [0, *accumulate(task_bytes)]
        self._listed: list[tuple[SourceFile, int, str]] = []
        self._started = self._told = monotonic()

    def advance(self, rows: int, *, tokens: int, task: int, read: int) -> None:
        """Some rows of a task, which has read so many bytes by now; all earlier tasks are done."""
        self.rows += rows
        self.tokens += tokens
        if monotonic() - self._told >= _EVERY_SECONDS:
            self._tell(self._before[task] + read)

    def skipped(self, file: SourceFile, place: int, reason: str) -> None:
        """A row that cannot be trained on."""
        self.bad_rows += 1
        if len(self._listed) < _LISTED:
            self._listed.append((file, place, reason))

    def fitted(self, fates: Iterable[Fate]) -> None:
        """Count what happened to rows that are longer than a sample, or of which nothing is trained."""
        self.fates.update(fates)

    @property
    def counts(self) -> dict[str, int]:
        """The counts of rows, as a Part has them."""
        fates = self.fates
        return {
            "rows": self.rows,
            "bad_rows": self.bad_rows,
            "long_rows": fates["long"] + fates["dropped"],
            "dropped_rows": fates["dropped"],
            "untrained_rows": fates["untrained"],
        }

    def finish(self) -> None:
        """Tell the end of it, and what was left out."""
        self._tell(self._before[-1])
        if self.bad_rows:
            places = locate([(file, place) for file, place, _ in self._listed])
            told = [f"{where}: {reason}" for where, (_, _, reason) in zip(places, self._listed, strict=True)]
            self._report("bad_rows_skipped", count=self.bad_rows, rows=told)

    def _tell(self, done: int) -> None:
        self._told = now = monotonic()
        total = max(self._before[-1], 1)
        left = (now - self._started) * (total - done) / done if done else None
        self._report(
            "prepare_progress",
            rows=self.rows,
            tokens=self.tokens,
            percent=round(100 * done / total, 1),
            eta_seconds=None if left is None else round(left),
        )
