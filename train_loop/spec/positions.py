"""Positions of problems in the YAML text of a spec."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from train_loop.spec.base import Problem
from train_loop.spec.text import Position, read_positions


def add_positions(problems: Iterable[Problem], text: str | bytes) -> list[Problem]:
    """Return the problems with line and column of their fields in YAML text. JSON text has no positions.

    A field that is missing from the text gets the position of its nearest parent.
    """
    given = list(problems)
    # The text is read a second time, and only if a problem needs it.
    positions = read_positions(text) if any(one.line is None for one in given) else {}
    return [_located(one, positions) for one in given]


def _located(problem: Problem, positions: Mapping[str, Position]) -> Problem:
    if problem.line is not None or (found := nearest_position(problem.pointer, positions)) is None:
        return problem
    line, column = found
    return replace(problem, line=line, column=column)


def nearest_position(pointer: str, positions: Mapping[str, Position]) -> Position | None:
    """Return the position of a field or of its nearest parent in the text; None if the text has no positions."""
    while pointer and pointer not in positions:
        pointer = pointer.rpartition("/")[0]
    return positions.get(pointer)
