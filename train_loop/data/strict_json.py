"""JSON of user data, with one meaning only: no key twice in an object, and only finite numbers."""

import math
from collections import Counter
from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with these keys. Raises ValueError for a key that it has twice, as either value may be meant."""
    made = dict(pairs)
    if len(made) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {name!r:.60} {count} times")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON; write null")


def finite(value: float) -> float:
    """Return a number. Raises ValueError for one that JSON cannot write: templates would write NaN or Infinity."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a number in JSON; write null")
    return value


def _read_float(text: str) -> float:
    try:
        return finite(float(text))
    except ValueError as error:
        raise ValueError(f"the number {text:.60} is too large; write a smaller one") from error


STRICT: dict[str, Any] = {
    "object_pairs_hook": unique_keys,
    "parse_constant": _refuse_constant,
    "parse_float": _read_float,
}
"""Arguments of `json.loads`, which accepts all of these by default."""
