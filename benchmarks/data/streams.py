"""Random samples for data streams, identical for Trainshed and its peers, and Trainshed's streams over them."""

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
from train_loop.data.stream.takeover import ray_stream
from train_loop.plan import MeshPlan

DATASET, ARROW, PARQUET = "dataset.json", "samples.arrow", "parquet"
CORES = 2
_ALONE = MeshPlan(ddp=1, fsdp=1, sp=1)
_VOCABULARY = 8192
_GROUP_ROWS = 1000
"""Rows per record batch and row group, as `datasets` writes them."""
_PARQUET_FILES = 8


def write_samples(folder: Path, *, samples: int, length: int) -> None:
    """Write random tokens in Trainshed's format, as an Arrow file for `datasets` to map, and as Parquet to stream."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(0, _VOCABULARY, (samples, length), dtype=np.int32)
    part = write_part((Sample(row, None, None, [length]) for row in ids), folder)
    # The fingerprint does not depend on the path, so that every round uses the same order.
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
    """Return the dataset that `write_samples` has written."""
    return Dataset.model_validate_json((folder / DATASET).read_bytes())


def plan_of(dataset: Dataset, *, batch: int, dp: int = 1, start: int = 0) -> StreamPlan:
    """Return the plan of a shuffled epoch from step `start`, with `batch` samples per step over all data ranks."""
    order = Order(dataset.samples, seed=0, shuffle=True, dataset=dataset.fingerprint, end=dataset.samples)
    steps = StepOrder(order, dp=dp, per_rank=batch // dp)
    return StreamPlan(dataset, steps, start * batch, steps.steps_left(start * batch))


def start_ray() -> None:
    """Start Ray with two CPUs, independent of the machine, and a process group with only this process."""
    ray.init(num_cpus=CORES, include_dashboard=False, logging_level=logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def local_rows(plan: StreamPlan) -> Iterator[Rows | None]:
    """Yield the rows of each step, read by this process, as under torchrun."""
    return local_stream(plan, _ALONE, 0)


def ray_rows(plan: StreamPlan) -> Iterator[Rows | None]:
    """Yield the rows of each step, read by Ray Data's tasks, as in the service."""
    return ray_stream(plan, _ALONE, 0, after=0.0)


def rate(counts: Iterable[int], *, of: int) -> float:
    """Return the rows/s of a stream of `of` rows after its first tenth; `counts` are the rows of each batch."""
    rows = counted = 0
    began = perf_counter()
    for count in counts:
        rows += count
        if not counted and rows >= of / 10:
            counted, began = rows, perf_counter()
    assert rows == of, f"the stream delivered {rows} rows; expected {of}"
    return (rows - counted) / (perf_counter() - began)
