"""Positions of problems in the YAML or JSON text of a spec."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from train_loop.spec.base import Problem
from train_loop.spec.text.document import read_positions
from train_loop.spec.text.limits import Position


def add_positions(problems: Iterable[Problem], text: str | bytes) -> list[Problem]:
    """Return the problems with line and column of their fields in a text; JSON of one line has no positions.

    A field that is missing from the text gets the position of its nearest parent.
    """
    given = list(problems)
    # The text is read a second time, and only if a problem needs it.
    positions = read_positions(text) if any(one.line is None for one in given) else {}
    return [locate(one, positions) for one in given]


def locate(problem: Problem, positions: Mapping[str, Position]) -> Problem:
    """Return a problem with the position of its field or of its nearest parent; unchanged if the text has none."""
    pointer = problem.pointer
    while pointer and pointer not in positions:
        pointer = pointer.rpartition("/")[0]
    if problem.line is not None or pointer not in positions:
        return problem
    line, column = positions[pointer]
    return replace(problem, line=line, column=column)


def describe(problem: Problem, file: str) -> str:
    """Return the error for a problem, `job.yaml:12:5: training.max_steps: …`; without a position, its JSON pointer.

    An error without a position or a pointer is one of the file.
    """
    if problem.line is None:
        return f"{problem.pointer or file or '/'}: {problem.message}"
    # Syntax errors repeat the position in their message.
    message = problem.message.removeprefix(f"line {problem.line}, column {problem.column}: ")
    field = f"{_dotted(problem.pointer)}: " if problem.pointer else ""
    return f"{file}:{problem.line}:{problem.column}: {field}{message}"


def _dotted(pointer: str) -> str:
    """Return a JSON pointer as `--set` writes the field: `training.max_steps`."""
    steps = pointer.removeprefix("/").split("/")
    return ".".join(step.replace("~1", "/").replace("~0", "~") for step in steps)
