"""Names of classes in rows, in place of their numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_SHOWN = 5
"""Number of names that a message shows."""


def class_numbers(cell: Any, names: Sequence[str]) -> Any:
    """Return a cell, or a list of labels, with the numbers of classes in place of their names.

    Other values stay. Raises ValueError for an unknown name.
    """
    if isinstance(cell, str):
        return _number(cell, _numbers(names), "")
    if not isinstance(cell, list) or not any(isinstance(one, str) for one in cell):
        return cell
    known = _numbers(names)
    found = [
        _number(one, known, f" at position {place}") if isinstance(one, str) else one for place, one in enumerate(cell)
    ]
    return np.array(found) if all(type(one) is int for one in found) else found


def _numbers(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _number(name: str, known: Mapping[str, int], place: str) -> int:
    if name in known:
        return known[name]
    some = ", ".join([*known][:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
    why = f", which is none of the names in model.head: {some}"
    if not known:
        why = " where a whole number is needed, because model.head gives classes no names"
    raise ValueError(f"{name!r:.200}{place}{why}")
