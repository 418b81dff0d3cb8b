"""JSON of user data, with one meaning only: no key twice in an object, and no NaN."""

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


STRICT: dict[str, Any] = {"object_pairs_hook": unique_keys, "parse_constant": _refuse_constant}
"""Arguments of `json.loads`, which accepts both by default."""
