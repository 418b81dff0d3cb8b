"""Trainshed's preparation of a corpus with a started Ray.

Run as `python -m benchmarks.data.prepare_run OUT FOLDER CACHE LENGTH BATCH`.

OUT receives the seconds until the samples are durable, for the first run and for a second run into another cache. For
the second it also receives the seconds to the first batch: read by this process as under torchrun, and by Ray Data.
"""

import json
import sys
from collections import deque
from pathlib import Path
from time import perf_counter

from benchmarks.data.corpus import CORPUS, WARM, corpus_spec
from benchmarks.data.streams import local_rows, plan_of, ray_rows, start_ray
from train_loop.data.dataset import Dataset
from train_loop.data.prepare.pipeline import prepare


def main() -> None:
    """Warm up on a little text, then prepare the corpus twice."""
    out, folder, cache = map(Path, sys.argv[1:4])
    length, batch = map(int, sys.argv[4:])
    start_ray()
    warm_up(tokenised(folder, WARM, cache / "warm", length), batch)
    began = perf_counter()
    tokenised(folder, CORPUS, cache / "first", length)
    again = perf_counter()
    dataset = tokenised(folder, CORPUS, cache / "again", length)
    seconds = perf_counter() - again
    local, through = first_batches(dataset, batch)
    found = {"tokens": dataset.tokens, "first_seconds": again - began, "seconds": seconds}
    found["first_batch"] = seconds + local
    out.write_text(json.dumps(found | {"first_batch_through_ray": seconds + through, "rows": dataset.samples}))


def warm_up(dataset: Dataset, batch: int) -> None:
    """Read a whole dataset in both ways: a stream that stays open would hold CPUs for a while."""
    for stream in (local_rows, ray_rows):
        deque(stream(plan_of(dataset, batch=batch)), maxlen=0)


def tokenised(folder: Path, file: str, cache: Path, length: int) -> Dataset:
    """Prepare a file's samples in an empty cache."""
    return prepare(corpus_spec(folder, file, length=length), cache, report=lambda *_, **__: None)


def first_batches(dataset: Dataset, batch: int) -> tuple[float, float]:
    """Return the seconds to the first step's rows, read by this process and by Ray Data."""
    plan = plan_of(dataset, batch=batch)
    began = perf_counter()
    next(local_rows(plan))
    read = perf_counter()
    next(ray_rows(plan))
    return read - began, perf_counter() - read


if __name__ == "__main__":
    main()
