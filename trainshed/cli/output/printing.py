"""Output of commands: answers on stdout, notes and the suggested next command on stderr."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, JsonValue
from rich.console import Console
from rich.text import Text

from service.api.schemas import JobOut
from service.domain.jobs.job import JobState
from train_loop.spec import show
from train_loop.spec import show_json as escape_json

console = Console(highlight=False, soft_wrap=True)
notes = Console(highlight=False, soft_wrap=True, stderr=True)
Cell = str | Text
_INDENT = "    "
_LEFT_OUT = frozenset({"seq", "time", "tree"})
"""Fields of lines that are not printed, or at another place; a tree has many lines."""
_TIMES = frozenset({"since", "deadline", "completed"})
"""Fields of events that hold a Unix time."""
_NEXT_COMMANDS = {
    JobState.QUEUED: "watch {}",
    JobState.STARTING: "watch {}",
    JobState.RUNNING: "watch {}",
    JobState.RECOVERING: "watch {}",
    JobState.PAUSING: "watch {} --until PAUSED",
    JobState.PAUSED: "resume {}",
    JobState.CANCELLING: "watch {} --until CANCELLED",
    JobState.CANCELLED: "clone {}",
    JobState.SUCCEEDED: "checkpoints {}",
    JobState.FAILED: "logs {}",
}


class Gone(BaseModel):
    """JSON output of a deletion or revocation, for which the service returns no body."""

    id: str
    gone: Literal[True] = True


def show_json(answer: BaseModel, *, lines: bool = False) -> None:
    """Print the service's answer as JSON. With `lines`, print it on one line."""
    print(escape_json(answer.model_dump_json(indent=None if lines else 2)), flush=True)


def show_text(text: str) -> None:
    """Print a line. Terminal control characters are escaped, in pipes too."""
    console.print(show(text), markup=False)


def show_note(text: str) -> None:
    """Print a note on stderr."""
    notes.print(show(text), markup=False)


def show_next(command: str) -> None:
    """Print the suggested next command on stderr."""
    notes.print(show(f"next: trainshed {command}"), markup=False, style="dim")


def next_command(job: JobOut) -> str:
    """Return the suggested next command for a job in its state."""
    if job.spec.kind == "infer" and job.state is JobState.SUCCEEDED:
        return f"results {job.id}"
    return _NEXT_COMMANDS[job.state].format(job.id)


def show_line(line: Mapping[str, JsonValue]) -> None:
    """Print an event or a metrics line: its local time, then its fields."""
    time = line.get("time")
    stamp = f"{datetime.fromtimestamp(time):%T}" if isinstance(time, int | float) else "--:--:--"
    fields = " ".join(f"{name}={_field(name, value)}" for name, value in line.items() if name not in _LEFT_OUT)
    show_text(f"{stamp} {fields}")


def _field(name: str, value: JsonValue) -> str:
    """Return a field of a line as text; a Unix time as local time."""
    if name in _TIMES and isinstance(value, int | float):
        return f"{datetime.fromtimestamp(value):%FT%T}"
    return _short(value)


def show_facts(facts: Mapping[str, object]) -> None:
    """Print one fact per line. Skips facts that are None."""
    for name, value in facts.items():
        if value is not None:
            show_text(f"{name:>20}  {value}")


def show_table(names: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print one line per row. If it is wider than the terminal, the last, longest column follows on lines below."""
    lines = [[Text(name, "dim") for name in names], *([_first_line(cell) for cell in row] for row in rows)]
    widths = [max(cell.cell_len for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        whole, last = _joined(line, widths), line[-1]
        if not console.is_terminal or whole.cell_len <= console.width:
            console.print(whole)
            continue
        start = _joined(line[:-1], widths)
        start.truncate(console.width, overflow="ellipsis")
        console.print(start)
        for part in last.wrap(console, console.width - len(_INDENT)):
            console.print(Text(_INDENT) + part)


def _joined(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    """Return cells in columns, without trailing spaces."""
    padded = [Text(" " * max(width - cell.cell_len, 0)) for cell, width in zip(cells, widths, strict=False)]
    whole = Text("  ").join(cell + space for cell, space in zip(cells, padded, strict=True))
    whole.rstrip()
    return whole


def _first_line(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(show(cell.partition("\n")[0]))


def _short(value: JsonValue) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
