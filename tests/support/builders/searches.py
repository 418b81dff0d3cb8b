"""The sizes of searches that try one seed after the other."""

import os


def seeds(number: int) -> int:
    """Return the number of seeds that a search tries: all, or a tenth if QUICK is set, as in `make test-fast`."""
    return number // 10 if os.environ.get("QUICK") else number
