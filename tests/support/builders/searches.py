"""The sizes of searches that try one seed after the other."""

import os


def seeds(number: int, *, more: int | None = None) -> int:
    """Return the number of seeds that a search tries.

    A tenth of `number` if QUICK is set, as in `make test-fast`; `more` if MORE is set, for a long search.
    """
    if os.environ.get("QUICK"):
        return number // 10
    return more if more is not None and os.environ.get("MORE") else number
