"""Openings of Trainshed's data at two steps in turn.

Run as `python -m benchmarks.data.resume_run OUT FOLDER WAY BATCH PAIRS EARLY LATE`.

WAY `local` or `ray` measures the time to the first batch; EARLY and LATE are steps. WAY `order` measures the sample ids
of a step; EARLY and LATE are samples.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.data.streams import local_rows, plan_of, ray_rows, read_dataset, start_ray
from benchmarks.data.two_places import in_turn
from train_loop.data.dataset import Rows
from train_loop.data.order import Order
from train_loop.data.stream.local import StreamPlan

_SAMPLES = 2 * 10**7
"""Samples of the epoch for `order`; it contains both samples."""
_STEPS = 2000
"""Number of consecutive steps to average, because the permutation takes more rounds for some positions."""


def main() -> None:
    """Open the data in turn, and write the seconds."""
    out, folder, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    batch, pairs, early, late = map(int, sys.argv[4:])
    if way == "ray":
        start_ray()
    ways: dict[str, Callable[[int], float]] = {
        "local": functools.partial(stream_seconds, folder, local_rows, batch),
        "ray": functools.partial(stream_seconds, folder, ray_rows, batch),
        "order": functools.partial(order_seconds, batch),
    }
    out.write_text(json.dumps(in_turn(ways[way], early, late, pairs=pairs)))


def stream_seconds(
    folder: Path, opened: Callable[[StreamPlan], Iterator[Rows | None]], batch: int, start: int
) -> float:
    """Return the seconds from a folder of prepared data to the first batch of a step."""
    began = perf_counter()
    rows = opened(plan_of(read_dataset(folder), batch=batch, start=start))
    next(rows)
    return perf_counter() - began


def order_seconds(batch: int, start: int) -> float:
    """Return the mean seconds per step of the steps from a sample on."""
    order = Order(_SAMPLES, seed=0, shuffle=True, dataset="", end=_SAMPLES)
    steps = start + np.arange(_STEPS * batch).reshape(_STEPS, batch)
    began = perf_counter()
    for positions in steps:
        order.at(positions)
    return (perf_counter() - began) / _STEPS


if __name__ == "__main__":
    main()
