"""Names that a message proposes in place of a wrong one."""

import difflib
from collections.abc import Iterable


def choices(wanted: str, names: Iterable[str], *, parts: int = 1) -> str:
    """Return names that would match, as a phrase, by their last parts: those similar to a wanted one first."""
    known = list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))
    if not known:
        return "the model has none; remove it"
    near = difflib.get_close_matches(wanted, known, n=3)
    return f"choose for example {', '.join(dict.fromkeys([*near, *known[:6]]))}"
