"""Common parts of a spec: strict frozen models, rejected values, and problems with a JSON pointer."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema, to_json, to_jsonable_python


class SpecModel(BaseModel):
    """A part of a job spec: frozen, strictly typed, and without undefined fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Problem:
    """One problem of a spec: an RFC 6901 pointer, and a message with the rule, the value and the remedy."""

    pointer: str
    message: str
    line: int | None = None
    """Line in the text, from 1; None if the position is unknown."""
    column: int | None = None
    """Column in the text, from 1, in characters; None if the position is unknown."""


class SpecError(ValueError):
    """A spec that cannot run; `problems` lists all its problems, not only the first."""

    code = "invalid_spec"

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.pointer}: {p.message}".removeprefix(": ") for p in problems))
        self.problems = problems


def is_default(default: object) -> Callable[[object], bool]:
    """Return the condition under which a newer field is not stored: stored specs then keep their digests."""
    return lambda value: value == default


_LONGEST = 200
"""Maximum characters of a rejected value in a message."""


_MISSPELT = ("literal_error", "bool_type")
"""Types of pydantic's errors about values that no version supports."""


@dataclass(frozen=True)
class Only:
    """A validator of a field, and its JSON schema."""

    supported: tuple[Any, ...]

    def check(self, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Return a supported value. Raises ValueError for all others, with one answer whatever they hold.

        A misspelt value is not one to come.
        """
        for supported in self.supported:
            for form in (supported, to_jsonable_python(supported)):
                # Types are compared too, because 1 == True.
                if type(value) is type(form) and value == form:
                    return supported
        choices, given = " or ".join(json.dumps(s) for s in self.supported), to_json(value).decode()
        fault = "not a value of this field" if _is_misspelt(value, handler) else "not supported yet"
        raise ValueError(f"{given if len(given) <= _LONGEST else 'it'} is {fault}; choose {choices}")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [*map(to_jsonable_python, self.supported)]}


def _is_misspelt(value: Any, handler: ValidatorFunctionWrapHandler) -> bool:
    """Return whether a value is none of the field's choices, in this version or a later one."""
    try:
        handler(value)
    except ValidationError as error:
        return all(one["type"] in _MISSPELT for one in error.errors())
    return False


def only(*supported: Any) -> Only:
    """Reject all values of a contract field except the values that the code supports today.

    It is declared at the field that it limits, so that no setting is accepted and ignored. A change that adds support
    extends or removes it.
    """
    return Only(supported)


def check_folder(uri: str | None) -> None:
    """Raise ValueError for a folder that service and workers would not find at the same place."""
    if uri is not None and not os.path.isabs(uri) and "://" not in uri:
        raise ValueError(
            f"{uri} is a relative path, but service and workers have different folders; write an absolute path"
        )
