"""Lines of JSON that runs write: writers may add fields, and every value is untrusted."""

import json
from collections.abc import Mapping

from pydantic import JsonValue

Line = Mapping[str, JsonValue]
"""One line of events.jsonl or metrics.jsonl. Any writer may add fields."""


_MOST_LEVELS = 64
"""Maximum nesting of a line: answers cannot contain much more, and writers of Trainshed use five."""


def parse(line: str) -> Line | None:
    """Parse a line of JSON; return None if it is not an object, or nested too deeply."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # A line has at most as many levels as brackets, which are faster to count.
    if line.count("[") + line.count("{") > _MOST_LEVELS and _levels(value) > _MOST_LEVELS:
        return None
    return value if isinstance(value, dict) else None


def _levels(value: JsonValue) -> int:
    """Return the number of nested lists and objects."""
    levels, inside = 0, [value]
    while inside := [part for part in inside if isinstance(part, dict | list)]:
        levels += 1
        inside = [part for one in inside for part in (one.values() if isinstance(one, dict) else one)]
    return levels


def number(line: Line, name: str) -> float | None:
    """Return a field of a line if it is a number; None otherwise."""
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
