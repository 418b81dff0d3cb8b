"""The text of other tools' configurations: YAML and JSON. TOML is read only to name its tool."""

import re
import tomllib
from collections.abc import Sequence
from typing import Any

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.recognise import Tool, marked_tools, recognise
from train_loop.spec.text import MAX_YAML_BYTES, check_data, read_yaml

_TOML = re.compile(
    rb"\s*(?:#[^\n]*\n\s*)*(?:\[{1,2}[\w.\"' -]+\]{1,2}[ \t]*(?:#[^\n]*)?(?:\r?\n|$)|[\w.\"'-]+[ \t]*=[^=])"
)
"""The first line of TOML: a table, or a field and its value."""


def read_text(text: bytes, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the fields of YAML or JSON. Raises SpecError with the position; an error about TOML names its tool."""
    try:
        data = read_yaml(text, aliases=True)
    except SpecError:
        _refuse_toml(text, tools)
        raise
    if not isinstance(data, dict):
        _refuse_toml(text, tools)
        raise SpecError([Problem("", "the file is not a mapping of fields")])
    return data


def _refuse_toml(text: bytes, tools: Sequence[Tool]) -> None:
    """Raise SpecError for TOML. Text that only begins like TOML is treated as such, too."""
    if _TOML.match(text) is None:
        return
    try:
        data = tomllib.loads(text.decode()) if len(text) <= MAX_YAML_BYTES else {}
        check_data(data)
    except (ValueError, RecursionError):
        data = {}
    if marked_tools(data, tools):
        recognise(data, tools)
    raise SpecError([Problem("", "the file is TOML, and configurations are read as YAML or JSON; convert it")])
