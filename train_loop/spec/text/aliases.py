"""Anchors, aliases and merge keys of YAML, which configurations of other tools may use; job specs may not."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

MERGE = "<<"


class Anchors:
    """The values of a YAML text that have names (`&name`)."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def note(self, name: str | None, value: Any) -> None:
        """Note the value of an anchor; a later one of the same name replaces it."""
        if name is not None:
            self._values[name] = value

    def copy(self, name: str | None, unfinished: Iterable[Any]) -> tuple[Any, int]:
        """Return a copy of the value of an anchor, and its number of values and keys. Raises ValueError."""
        if name not in self._values:
            raise ValueError(f"*{name} refers to no anchor before it; write &{name} before a value")
        value = self._values[name]
        if any(value is one for one in unfinished):
            raise ValueError(f"*{name} lies inside of its own value; write the value out")
        return copy.deepcopy(value), _count(value)


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + _count(one) for one in value.values())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def merge_keys(value: Any) -> Any:
    """Return data whose merge keys (`<<`) are replaced by the fields that they name; own fields win."""
    if isinstance(value, list):
        return [merge_keys(one) for one in value]
    if not isinstance(value, dict):
        return value
    own = {name: merge_keys(one) for name, one in value.items() if name != MERGE}
    given = merge_keys(value.get(MERGE))
    merged: dict[str, Any] = {}
    # Earlier mappings of a list win.
    for one in reversed(given if isinstance(given, list) else [given]):
        merged |= one if isinstance(one, Mapping) else {}
    return merged | own
