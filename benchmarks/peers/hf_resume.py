"""Data resume with Hugging Face: `-m benchmarks.peers.hf_resume OUT FOLDER WAY BATCH PAIRS EARLY LATE`.

WAY `skip` streams Parquet through the shuffle buffer of `datasets` and skips to the step. `state` loads the state of a
stream at that step instead, which loses the content of its buffer. `trainer` resumes as Trainer does: a map-style
dataset with a seeded random sampler, and Accelerate's skip_first_batches. Closing a stream does not count.
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

from benchmarks.data.streams import ARROW, PARQUET
from benchmarks.data.two_places import in_turn
from train_loop.system.exit import leave

_BUFFER = 1000
"""Size of the shuffle buffer in samples, the default and the guide's value."""


def main() -> None:
    """Open the data in turn, and write the seconds."""
    out, folder, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    batch, pairs, early, late = map(int, sys.argv[4:])
    # `datasets` sleeps 5 s at the end of each stream, to protect the interpreter's shutdown.
    config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    states = {step: state_at(folder, batch, step) for step in (0, early, late)} if way == "state" else {}
    ways = {
        "skip": functools.partial(skip_seconds, folder, batch),
        "state": functools.partial(state_seconds, folder, batch, states),
        "trainer": functools.partial(trainer_seconds, folder, batch),
    }
    out.write_text(json.dumps(in_turn(ways[way], early, late, pairs=pairs)))


def streamed(folder: Path) -> IterableDataset:
    """Return the shuffled stream of samples."""
    samples = load_dataset("parquet", data_files=str(folder / PARQUET / "*.parquet"), split="train", streaming=True)
    return samples.shuffle(seed=0, buffer_size=_BUFFER).with_format("torch")


def skip_seconds(folder: Path, batch: int, step: int) -> float:
    """Return the seconds to the first batch after skipping the samples of `step` steps."""
    began = perf_counter()
    batches = iter(DataLoader(streamed(folder).skip(step * batch), batch_size=batch))
    next(batches)
    return perf_counter() - began


def state_at(folder: Path, batch: int, step: int) -> dict[str, Any]:
    """Return the state of a stream after the samples of `step` steps."""
    samples = streamed(folder)
    rows = iter(samples)
    for _ in range(step * batch):
        next(rows)
    found: dict[str, Any] = samples.state_dict()
    return found


def state_seconds(folder: Path, batch: int, states: dict[int, dict[str, Any]], step: int) -> float:
    """Return the seconds to the first batch after loading the state of `step` steps."""
    began = perf_counter()
    samples = streamed(folder)
    samples.load_state_dict(states[step])
    batches = iter(DataLoader(samples, batch_size=batch))
    next(batches)
    return perf_counter() - began


def trainer_seconds(folder: Path, batch: int, step: int) -> float:
    """Return the seconds to the first batch of Trainer's loader after skipping `step` batches."""
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
