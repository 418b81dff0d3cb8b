"""Limits of plain data, errors at its fields, and their pointers."""

import math
import re
from collections.abc import Iterable
from typing import Any

from train_loop.spec.base import Problem, SpecError

MAX_YAML_BYTES = 256 * 1024
"""Maximum bytes of a YAML body. JSON is faster to read and may be as large as the service accepts bodies."""
MAX_DEPTH = 32
"""Maximum depth of lists and mappings inside one another."""
MAX_NODES = 10_000
"""Maximum number of values, keys, lists and mappings in all."""

TOO_DEEP = f"lists and mappings are nested over {MAX_DEPTH} levels deep; use fewer levels"
TOO_MANY = f"the body holds over {MAX_NODES} values; send a smaller spec"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
Position = tuple[int, int]
"""Line and column in a text, both from 1; columns count characters."""


def refused(pointer: str, message: str, position: Position | None = None) -> SpecError:
    """Return the error for one problem. A position becomes part of the message, too."""
    if position is None:
        return SpecError([Problem(pointer, message)])
    line, column = position
    return SpecError([Problem(pointer, f"line {line}, column {column}: {message}", line, column)])


def as_pointer(steps: list[str]) -> str:
    """Return steps as an RFC 6901 pointer."""
    return "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)


def check_data(data: Any) -> None:
    """Raise SpecError for data that is too large or too deep, or holds infinite numbers, lone surrogates or NUL."""
    nodes, depth, level = 0, 0, [(data, list[str]())]
    while level:
        depth, below = depth + 1, []
        for value, steps in level:
            nodes += 1
            if isinstance(value, dict | list):
                if depth > MAX_DEPTH:
                    raise refused(as_pointer(steps), TOO_DEEP)
                nodes += len(value) if isinstance(value, dict) else 0
                # Checked before its values are listed: there may be a million.
                if nodes + len(value) > MAX_NODES:
                    raise refused("", TOO_MANY)
                below += [(one, [*steps, str(key)]) for key, one in _items(value)]
            _check_scalar(value, steps)
        level = below


def _items(value: dict[Any, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _check_scalar(value: Any, steps: list[str]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise refused(as_pointer(steps), f"{value} is not a JSON number; write a finite number")
    if isinstance(value, str):
        _check_text(value, steps)
    if isinstance(value, dict):
        for key in value:
            _check_text(str(key), steps)


def _check_text(text: str, steps: list[str]) -> None:
    if _LONE_SURROGATE.search(text):
        raise refused(as_pointer(steps), "the text holds half of a character (a lone surrogate); write it whole")
    if "\0" in text:
        raise refused(as_pointer(steps), "the text holds a NUL character, which no path or name may hold; remove it")
