"""Seconds of the same thing at two places of the data, an early one and a late one, taken in turn in one process."""

import gc
from collections.abc import Callable
from time import sleep
from typing import Any

import numpy as np

_SETTLE_SECONDS = 0.5
"""What is left of one stream must have ended before the next one is opened."""


def in_turn(seconds_at: Callable[[int], float], early: int, late: int, *, pairs: int) -> dict[str, Any]:
    """Medians and all values, after one that is not counted, with the other place first in every second pair."""
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
