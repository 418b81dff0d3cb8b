"""Lines of JSON as runs write them: any writer may add fields, and none of them is to be trusted."""

import json

from service.ports import Line


def parse(line: str) -> Line | None:
    """A line of JSON; None for what is no object."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def number(line: Line, name: str) -> float | None:
    """A number of a line, if it is one."""
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
