"""Lines of JSON that runs write: writers may add fields, and every value is untrusted."""

import json
from collections.abc import Mapping

from pydantic import JsonValue

Line = Mapping[str, JsonValue]
"""One line of events.jsonl or metrics.jsonl. Any writer may add fields."""


def parse(line: str) -> Line | None:
    """Parse a line of JSON; return None if it is not an object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(line: Line, name: str) -> float | None:
    """Return a field of a line if it is a number; None otherwise."""
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
