"""Defaults of a tool against a spec's: a field that a file leaves out has the tool's own value.

Each tool answers for every field of `data:`, `model:` and `training:`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from train_loop.spec.importers.draft import Draft, default_of


@dataclass(frozen=True)
class ToolDefault:
    """The tool's own value of a field that its file does not set. It is written if it is not that of a spec."""

    value: JsonValue
    field: str = ""
    """The tool's field with this default; it is then written in any case."""
    why: str = ""


@dataclass(frozen=True)
class SpecDefault:
    """The default of a spec counts, whatever it is."""

    why: str


@dataclass(frozen=True)
class Derived:
    """The importer derives the value from other fields of the file."""


Answer = ToolDefault | SpecDefault | Derived


def write_defaults(draft: Draft, answers: Mapping[str, Answer], tool: str, *, below: str = "") -> None:
    """Write the tool's own value of each field that nothing in the file has set; `below` is the path of its fields."""
    for target, answer in answers.items():
        if not isinstance(answer, ToolDefault):
            continue
        if answer.field or answer.value != default_of(target):
            field = f"{below}{answer.field}" if answer.field else ""
            draft.assume(field, target, answer.value, tool=", ".join(filter(None, (tool, answer.why))))
