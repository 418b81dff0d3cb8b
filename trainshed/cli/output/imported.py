"""Output of `trainshed import`: the spec as YAML with comments, and the report of all fields."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import yaml
from rich.text import Text

from train_loop.spec import show
from train_loop.spec.importers import Imported, Outcome, Row
from trainshed.cli.output.printing import console, notes

_STYLES = {Outcome.NEEDED: "cyan", Outcome.NOT_SUPPORTED: "yellow", Outcome.UNKNOWN: "red"}
_NUMBERS = "≠ "


def spec_with_comments(found: Imported, names: Sequence[str]) -> str:
    """Return the spec as YAML, with comments on values to replace and on changes of numbers."""
    lines = [f"imported from {name} ({kind})" for name, kind in zip(names, found.formats, strict=True)]
    lines += [f"replace {row.target}: {row.reason}" for row in found.needed]
    lines += [f"changes numbers: {_subject(row)}: {row.reason}" for row in found.changes]
    head = "".join(f"# {show(line, lines=False)}\n" for line in dict.fromkeys(lines))
    return head + yaml.safe_dump(found.spec, sort_keys=False, allow_unicode=True, width=120)


def _subject(row: Row) -> str:
    return row.field or row.target or "loop"


def show_report(rows: Sequence[Row], *, on_stdout: bool) -> None:
    """Print a line for each field. ≠ marks what changes numbers."""
    screen = console if on_stdout else notes
    for row, count in _grouped(rows):
        marker = Text(_NUMBERS if row.changes_numbers else "  ", style="bold yellow")
        field = row.field if count == 1 else f"{row.field.partition('.')[0]}.* ({count} fields)"
        written = "" if row.target is None else f" → {row.target}: {row.written}"
        outcome = Text(f"{row.outcome:<14}", style=_STYLES.get(row.outcome, ""))
        screen.print(Text.assemble(marker, outcome, show(f"{field}{written}{_because(row.reason)}", lines=False)))


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Yield the rows; neighbours below one name that nothing is lost without, or of other workers, are one line."""
    ordered = sorted(rows, key=lambda row: (row.outcome is not Outcome.NEEDED, not row.changes_numbers))
    for _, group in groupby(ordered, key=_group):
        same = list(group)
        yield same[0], len(same)


def _group(row: Row) -> tuple[str, ...]:
    whole = row.outcome in (Outcome.NOT_NEEDED, Outcome.NOT_IMPORTED)
    return (row.field.partition(".")[0] if whole else row.field, row.outcome, row.target or "", row.reason)
