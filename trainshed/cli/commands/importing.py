"""`trainshed import`: configurations of other tools as a job spec, and a report of each field."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.text import Text

from train_loop.spec import describe, show
from train_loop.spec.importers import Imported, Outcome, Row, SourceError, SourceFile, import_files
from trainshed.cli.exit_codes import Exit, fail
from trainshed.cli.options import AsJson, Overrides, read_file, read_overrides, write_file
from trainshed.cli.output.printing import console, notes, show_json, show_next

_STYLES = {Outcome.NEEDED: "cyan", Outcome.NOT_SUPPORTED: "yellow", Outcome.UNKNOWN: "red"}
_NUMBERS = "≠ "


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="ROLL's YAML, Accelerate's configuration, TrainingArguments or a DistributedConfig; of several files, "
            "later ones win; - reads standard input",
            allow_dash=True,
        ),
    ],
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="worker of ROLL's file [default: the only one with fsdp2_train]")
    ] = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write instead of standard output")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a configuration of ROLL, Accelerate or transformers into a job spec. Needs no service.

    The report has a line for each field: what became of it, and why. ≠ marks what changes numbers.
    """
    sources = [_source(file) for file in files]
    try:
        found = import_files(sources, worker=worker, overrides=read_overrides(overrides or ()))
    except SourceError as error:
        fail("the file cannot be imported:", [describe(one, error.file) for one in error.problems], code=Exit.USAGE)
    text = _yaml(found, [source.name for source in sources])
    if output is not None:
        write_file(output, text.encode())
    if as_json:
        show_json(found)
        return
    if output is None:
        print(text, end="")
    _report(found.rows, on_stdout=output is not None)
    show_next(f"plan {output or 'FILE'}" + "".join(f" --set {row.target}=…" for row in found.needed if _is_path(row)))


def _is_path(row: Row) -> bool:
    return row.target is not None and row.target.endswith("path")


def _source(file: Path) -> SourceFile:
    name = "<stdin>" if str(file) == "-" else str(file)
    return SourceFile(name, read_file(file, "configuration"), _reader(file))


def _reader(file: Path) -> Callable[[str], bytes | None]:
    """Return a function that reads the configs which Hydra finds beside a file."""

    def read(name: str) -> bytes | None:
        beside = file.parent / f"{name}.yaml"
        return beside.read_bytes() if str(file) != "-" and beside.is_file() else None

    return read


def _yaml(found: Imported, names: Sequence[str]) -> str:
    """Return the spec as YAML, with comments on what the user replaces and on what changes numbers."""
    lines = [f"imported from {name} ({kind})" for name, kind in zip(names, found.formats, strict=True)]
    lines += [f"replace {row.target}: {row.reason}" for row in found.needed]
    lines += [f"changes numbers: {_subject(row)}: {row.reason}" for row in found.changes]
    head = "".join(f"# {show(line, lines=False)}\n" for line in dict.fromkeys(lines))
    return head + yaml.safe_dump(found.spec, sort_keys=False, allow_unicode=True, width=120)


def _subject(row: Row) -> str:
    return row.field or row.target or "loop"


def _report(rows: Sequence[Row], *, on_stdout: bool) -> None:
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
