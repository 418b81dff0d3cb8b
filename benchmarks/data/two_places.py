"""Alternate measurement at an early and a late position of the data, in one process."""

import gc
from collections.abc import Callable
from time import sleep
from typing import Any

import numpy as np

_SETTLE_SECONDS = 0.5
"""Pause in which the threads and tasks of a closed stream end before the next stream opens."""


def in_turn(seconds_at: Callable[[int], float], early: int, late: int, *, pairs: int) -> dict[str, Any]:
    """Return medians and all values, after one warm-up; the first position of a pair alternates."""
    seconds_at(0)
    found: dict[int, list[float]] = {early: [], late: []}
    for number in range(pairs):
        for place in (early, late) if number % 2 == 0 else (late, early):
            gc.collect()
            sleep(_SETTLE_SECONDS)
            found[place].append(seconds_at(place))
    return {
        "early": float(np.median(found[early])),
        "late": float(np.median(found[late])),
        "seconds": {str(place): values for place, values in found.items()},
    }
