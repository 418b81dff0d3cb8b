"""Common parts of a spec: strict frozen models, rejected values, and problems with a JSON pointer."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import to_json


class SpecModel(BaseModel):
    """A part of a job spec: frozen, strictly typed, and without undefined fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Problem:
    """One problem of a spec: an RFC 6901 pointer, and a message with the rule, the value and the remedy."""

    pointer: str
    message: str
    line: int | None = None
    """Line in the YAML text, from 1; None if the position is unknown."""
    column: int | None = None
    """Column in the YAML text, from 1, in characters; None if the position is unknown."""


class SpecError(ValueError):
    """A spec that cannot run; `problems` lists everything that is wrong with it, not only the first problem."""

    code = "invalid_spec"

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.pointer}: {p.message}".removeprefix(": ") for p in problems))
        self.problems = problems


def only(*supported: Any) -> AfterValidator:
    """Reject all values of a contract field except the values that the code supports today.

    It is declared at the field that it limits, so that no setting is accepted and ignored. A change that adds support
    extends or removes it.
    """

    def check(value: Any) -> Any:
        # Types are compared too, because 1 == True.
        if any(type(value) is type(s) and value == s for s in supported):
            return value
        choices = " or ".join(json.dumps(s) for s in supported)
        raise ValueError(f"{to_json(value).decode()} is not supported yet; choose {choices}")

    return AfterValidator(check)
