"""Samples to stream, the same tokens for us and for the peers, and how our streams are opened on them."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch.distributed as dist
from numpy.typing import NDArray

from train_loop.data.dataset import Dataset, Rows
from train_loop.data.order import Order, StepOrder
from train_loop.data.prepare.packing import Sample
from train_loop.data.shards import write_part
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.data.stream.ray_data import ray_stream
from train_loop.plan import MeshPlan

DATASET, ARROW, PARQUET = "dataset.json", "samples.arrow", "parquet"
CORES = 2
_ALONE = MeshPlan(ddp=1, fsdp=1, sp=1)
_VOCABULARY = 8192
_GROUP_ROWS = 1000
"""Rows of a record batch and of a row group, as `datasets` writes them."""
_PARQUET_FILES = 8


def write_samples(folder: Path, *, samples: int, length: int) -> None:
    """Random tokens: as we prepare them, as an Arrow file that `datasets` maps, and as Parquet that it streams."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(0, _VOCABULARY, (samples, length), dtype=np.int32)
    part = write_part((Sample(row, None, None, [length]) for row in ids), folder)
    # Known by what it holds, so that every round takes the same order wherever it lies.
    dataset = Dataset(fingerprint=f"{samples}x{length}", parts=(part,), sequence_length=length)
    (folder / DATASET).write_text(dataset.model_dump_json())
    table = _table(ids)
    with pa.OSFile(str(folder / ARROW), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=_GROUP_ROWS)
    (folder / PARQUET).mkdir()
    for number, rows in enumerate(np.array_split(ids, _PARQUET_FILES)):
        pq.write_table(_table(rows), folder / PARQUET / f"{number}.parquet", row_group_size=_GROUP_ROWS)


def _table(ids: NDArray[np.int32]) -> pa.Table:
    offsets = np.arange(0, ids.size + 1, ids.shape[1], dtype=np.int32)
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids.reshape(-1)))})


def read_dataset(folder: Path) -> Dataset:
    """What `write_samples` has written, as a run finds it."""
    return Dataset.model_validate_json((folder / DATASET).read_bytes())


def plan_of(dataset: Dataset, *, batch: int, dp: int = 1, start: int = 0) -> StreamPlan:
    """A shuffled epoch from step `start` on, `batch` samples a step over all data ranks."""
    order = Order(dataset.samples, seed=0, shuffle=True, dataset=dataset.fingerprint, end=dataset.samples)
    steps = StepOrder(order, dp=dp, per_rank=batch // dp)
    return StreamPlan(dataset, steps, start * batch, steps.steps_left(start * batch))


def start_ray() -> None:
    """A Ray of two CPUs, whatever the machine has, and a process group of this process alone."""
    ray.init(num_cpus=CORES, include_dashboard=False, logging_level=logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def local_rows(plan: StreamPlan) -> Iterator[Rows | None]:
    """All rows of each step, read by this process, as under torchrun."""
    return local_stream(plan, _ALONE, 0)


def ray_rows(plan: StreamPlan) -> Iterator[Rows | None]:
    """All rows of each step, read by Ray Data's tasks, as in the service."""
    return ray_stream(plan, _ALONE, 0, after=0.0)


def rate(counts: Iterable[int], *, of: int) -> float:
    """Rows/s of a stream of so many rows by the numbers that come at once, from a tenth of them on."""
    rows = counted = 0
    began = perf_counter()
    for count in counts:
        rows += count
        if not counted and rows >= of / 10:
            counted, began = rows, perf_counter()
    assert rows == of, f"{rows} rows came of {of}"
    return (rows - counted) / (perf_counter() - began)
