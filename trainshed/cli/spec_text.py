"""The text of a spec file, and errors that name its lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from service.api.schemas import ProblemOut
from train_loop.spec import Position, Problem, describe, locate, read_positions


@dataclass(frozen=True)
class SpecText:
    """A spec file with its overrides."""

    name: str
    """Name of the file in errors; empty if the spec is not from a file."""
    text: bytes
    overrides: Sequence[str] = ()

    def error(self, problem: ProblemOut | Problem) -> str:
        """Return the error for one problem: its place, its message, and the override that caused it."""
        if override := override_at(problem.pointer, self.overrides):
            return f"{problem.pointer or '/'}: {problem.message} (--set {override})"
        # With overrides, the service gets JSON and has no positions.
        found = Problem(problem.pointer, problem.message, problem.line, problem.column)
        return describe(locate(found, self._positions), self.name)

    @cached_property
    def _positions(self) -> dict[str, Position]:
        return read_positions(self.text)


def override_at(pointer: str, overrides: Sequence[str]) -> str | None:
    """Return the override that sets the value at a JSON pointer, or None."""
    places = {"/" + override.partition("=")[0].replace(".", "/"): override for override in overrides}
    return next((override for place, override in places.items() if f"{pointer}/".startswith(f"{place}/")), None)
