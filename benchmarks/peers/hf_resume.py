"""Resuming data by Hugging Face's means: `-m benchmarks.peers.hf_resume OUT FOLDER WAY BATCH PAIRS EARLY LATE`.

WAY is `skip`: Parquet that `datasets` streams through a shuffle buffer, skipped up to the step; `state`: the same, with
the state of a run that came so far, which loses what was in its buffer; or `trainer`: as Trainer resumes, a map-style
dataset with a seeded random sampler, and Accelerate's skip_first_batches. Taking a stream down is not counted.
"""

import functools
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from datasets import Dataset, IterableDataset, config, load_dataset
from torch.utils.data import DataLoader

from benchmarks.streams import ARROW, PARQUET
from benchmarks.two_places import in_turn
from train_loop.system.exit import leave

_BUFFER = 1000
"""Samples that are shuffled among each other, by default and in the guide."""


def main() -> None:
    """Open, and write the seconds."""
    out, folder, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    batch, pairs, early, late = map(int, sys.argv[4:])
    # It sleeps five seconds wherever a stream ends, for the sake of an interpreter that ends with it.
    config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    states = {step: state_at(folder, batch, step) for step in (0, early, late)} if way == "state" else {}
    ways = {
        "skip": functools.partial(skip_seconds, folder, batch),
        "state": functools.partial(state_seconds, folder, batch, states),
        "trainer": functools.partial(trainer_seconds, folder, batch),
    }
    out.write_text(json.dumps(in_turn(ways[way], early, late, pairs=pairs)))


def streamed(folder: Path) -> IterableDataset:
    """The samples as they are streamed and shuffled."""
    samples = load_dataset("parquet", data_files=str(folder / PARQUET / "*.parquet"), split="train", streaming=True)
    return samples.shuffle(seed=0, buffer_size=_BUFFER).with_format("torch")


def skip_seconds(folder: Path, batch: int, step: int) -> float:
    """To the first batch after the samples of `step` steps have been skipped."""
    began = perf_counter()
    batches = iter(DataLoader(streamed(folder).skip(step * batch), batch_size=batch))
    next(batches)
    return perf_counter() - began


def state_at(folder: Path, batch: int, step: int) -> dict[str, Any]:
    """The state of a stream of which the samples of `step` steps have been taken."""
    samples = streamed(folder)
    rows = iter(samples)
    for _ in range(step * batch):
        next(rows)
    found: dict[str, Any] = samples.state_dict()
    return found


def state_seconds(folder: Path, batch: int, states: dict[int, dict[str, Any]], step: int) -> float:
    """To the first batch after the state of `step` steps has been loaded."""
    began = perf_counter()
    samples = streamed(folder)
    samples.load_state_dict(states[step])
    batches = iter(DataLoader(samples, batch_size=batch))
    next(batches)
    return perf_counter() - began


def trainer_seconds(folder: Path, batch: int, step: int) -> float:
    """To the first batch of a loader as Trainer prepares it, after `step` batches have been skipped."""
    began = perf_counter()
    samples = Dataset.from_file(str(folder / ARROW)).with_format("torch")
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    )
    loader = accelerator.prepare(DataLoader(samples, batch_size=batch, shuffle=True))
    batches = iter(skip_first_batches(loader, step))
    next(batches)
    return perf_counter() - began


if __name__ == "__main__":
    main()
    leave()
