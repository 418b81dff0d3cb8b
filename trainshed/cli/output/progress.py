"""Live display of jobs: progress bars on a terminal, lines elsewhere, JSON lines for programs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from service.api.schemas import JobOut
from train_loop.spec import show as escaped
from trainshed.cli.ids import shorten
from trainshed.cli.output.jobs import pace_of, progress_of, state_of, why
from trainshed.cli.output.printing import show_json

Display = Callable[[Sequence[JobOut]], None]
"""Function that shows the current state of jobs."""
_LINE_PERCENT = 10
_WIDE = 120
"""Width of a terminal in which whole ids fit."""
_NARROW_NAME = 14


def display(console: Console, *, as_json: bool) -> AbstractContextManager[Display]:
    """Return the display that suits the console."""
    if as_json:
        return nullcontext(_json_lines())
    if console.is_terminal and not console.is_dumb_terminal:
        return _bars(console)
    return nullcontext(_lines(console))


class _Cell(ProgressColumn):
    """One column of a job's row."""

    def __init__(self, cell: Callable[[JobOut], str | Text], *, last: bool = False) -> None:
        # The last column is the longest, and is truncated at the terminal's edge.
        super().__init__(Column(no_wrap=True, overflow="ellipsis", ratio=1 if last else None))
        self._cell = cell

    def render(self, task: Task) -> Text:
        """Render the column for the job of a row."""
        found = self._cell(task.fields["job"])
        return found if isinstance(found, Text) else Text(escaped(found))


def _columns(width: int) -> list[ProgressColumn]:
    """Return the columns of a row. A narrow terminal gets short ids, names and bars, and the reason or the pace."""
    if width >= _WIDE:
        start = [_Cell(lambda job: job.id), _Cell(lambda job: job.name), _Cell(state_of)]
        return [*start, BarColumn(20), _Cell(progress_of), _Cell(pace_of), _Cell(why, last=True)]
    start = [_Cell(lambda job: shorten([job.id])[0]), _Cell(lambda job: _cut(job.name, _NARROW_NAME)), _Cell(state_of)]
    return [*start, BarColumn(6), _Cell(progress_of), _Cell(lambda job: why(job) or pace_of(job), last=True)]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


@contextmanager
def _bars(console: Console) -> Iterator[Display]:
    rows = Progress(*_columns(console.width), console=console, expand=True)
    tasks: dict[str, TaskID] = {}

    def show(jobs: Sequence[JobOut]) -> None:
        for job in jobs:
            if job.id not in tasks:
                tasks[job.id] = rows.add_task(job.name, job=job)
            # Without a total, rich pulses the bar, as if the job were working.
            total = job.progress.of or (None if job.progress.step else 1)
            rows.update(tasks[job.id], completed=job.progress.step, total=total, job=job)

    with rows:
        yield show


def _lines(console: Console) -> Display:
    shown: dict[str, object] = {}

    def show(jobs: Sequence[JobOut]) -> None:
        for job in jobs:
            news = (job.state, why(job), (job.progress.percent or 0) // _LINE_PERCENT)
            if shown.get(job.id) != news:
                shown[job.id] = news
                parts = (job.id, job.name, job.state, progress_of(job), pace_of(job), why(job))
                line = f"{datetime.now():%T} {'  '.join(part for part in parts if part)}"
                console.print(escaped(line), markup=False)

    return show


def _json_lines() -> Display:
    shown: dict[str, object] = {}

    def show(jobs: Sequence[JobOut]) -> None:
        for job in jobs:
            # Usage hours are left out: they change at every poll.
            news = (job.state, job.reason, job.progress, job.attempts, job.restarts)
            if shown.get(job.id) != news:
                shown[job.id] = news
                show_json(job, lines=True)

    return show
