"""The text of a spec file, and errors that name its lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from service.api.schemas import ProblemOut
from train_loop.spec import Position, Problem, nearest_position, read_positions


@dataclass(frozen=True)
class SpecText:
    """A spec file with its overrides."""

    name: str
    """Name of the file in errors; empty if the spec is not from a file."""
    text: bytes
    overrides: Sequence[str] = ()

    def error(self, problem: ProblemOut | Problem) -> str:
        """Return the error for one problem: its place, its message, and the override that caused it.

        The place is `job.yaml:12:5: training.steps` for fields of YAML text, and the JSON pointer for all others.
        """
        if override := override_at(problem.pointer, self.overrides):
            return f"{problem.pointer or '/'}: {problem.message} (--set {override})"
        if (position := self._position(problem)) is None:
            return f"{problem.pointer or '/'}: {problem.message}"
        line, column = position
        # Syntax errors repeat the position in their message.
        message = problem.message.removeprefix(f"line {line}, column {column}: ")
        field = f"{_dotted(problem.pointer)}: " if problem.pointer else ""
        return f"{self.name}:{line}:{column}: {field}{message}"

    def _position(self, problem: ProblemOut | Problem) -> Position | None:
        if problem.line is not None and problem.column is not None:
            return problem.line, problem.column
        # With overrides, the service gets JSON and has no positions.
        return nearest_position(problem.pointer, self._positions)

    @cached_property
    def _positions(self) -> dict[str, Position]:
        return read_positions(self.text)


def _dotted(pointer: str) -> str:
    """Return a JSON pointer as `--set` writes the field: `training.max_steps`."""
    steps = pointer.removeprefix("/").split("/")
    return ".".join(step.replace("~1", "/").replace("~0", "~") for step in steps)


def override_at(pointer: str, overrides: Sequence[str]) -> str | None:
    """Return the override that sets the value at a JSON pointer, or None."""
    places = {"/" + override.partition("=")[0].replace(".", "/"): override for override in overrides}
    return next((override for place, override in places.items() if f"{pointer}/".startswith(f"{place}/")), None)
