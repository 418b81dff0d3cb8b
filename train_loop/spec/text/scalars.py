"""Values of YAML's scalars, by its core schema: null, booleans, numbers, text.

PyYAML's constructors follow YAML 1.1, in which 1e-6 is text.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)")
# The syntax of YAML 1.2 and JSON: 1e-6 is a number.
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {
    written: value
    for value, words in ((True, ("yes", "true", "on")), (False, ("no", "false", "off")))
    for word in words
    for written in (word, word.capitalize(), word.upper())
}


def read_scalar(event: yaml.ScalarEvent) -> Any:
    """Return the value of a scalar by YAML's core schema. Raises ValueError."""
    text: str = event.value
    if event.tag in (None, "!"):
        # A quoted scalar is text.
        return text if event.tag == "!" or not event.implicit[0] else _plain(text)
    read = _TAGGED.get(event.tag)
    if read is None:
        known = ", ".join(f"!!{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))
        raise ValueError(f"{show_tag(event.tag)} is not a tag of a job spec; remove it, or use one of {known}")
    try:
        return read(text)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{show_tag(event.tag)} does not fit {text[:64]!r}; remove one of them") from error


def _plain(text: str) -> Any:
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return _int(text)
    return _float(text) if _FLOAT.fullmatch(text) or _SPECIAL.fullmatch(text) else text


def _int(text: str) -> int:
    if not _INT.fullmatch(text):
        raise ValueError(f"{text[:64]!r} is not an integer")
    digits, sign = text.lstrip("+-").replace("_", ""), -1 if text.startswith("-") else 1
    base = {"0b": 2, "0x": 16, "0o": 8}.get(digits[:2], 8 if len(digits) > 1 and digits.startswith("0") else 10)
    try:
        return sign * int(digits, base)
    except ValueError as error:
        raise ValueError(f"{text[:64]!r} is not an integer that can be read") from error


def _float(text: str) -> float:
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if not _SPECIAL.fullmatch(text):
        raise ValueError(f"{text[:64]!r} is not a number")
    return float(text.replace(".", "", 1))


def _null(text: str) -> None:
    if text not in _NULLS:
        raise ValueError(f"{text[:64]!r} is not null")


_TAGGED: dict[str, Callable[[str], Any]] = {
    f"{TAG}str": str,
    f"{TAG}int": _int,
    f"{TAG}float": _float,
    f"{TAG}bool": _BOOLS.__getitem__,
    f"{TAG}null": _null,
}


def show_tag(tag: str | None) -> str:
    """Return a tag as it is written in a text."""
    return (tag or "").replace(TAG, "!!")[:64]


def read_number(text: str) -> int | float | None:
    """Return the finite decimal number of a text, as YAML and JSON write it without quotes; None for other text."""
    try:
        number = _plain(text.strip())
    except ValueError:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return None
    return number
