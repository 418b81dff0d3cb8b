"""Trainshed's data stream, read without a model by two data ranks: `-m benchmarks.data.drain_run OUT FOLDER WAY BATCH`.

With WAY `local`, each rank's process reads its own rows, as under torchrun. With `ray`, tasks of Ray Data read for both
ranks, as in the service.
"""

import json
import multiprocessing
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import ray
from ray.data import DataIterator

from benchmarks.data.streams import CORES, plan_of, rate, read_dataset, start_ray
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.data.stream.ray_data import by_step, open_splits
from train_loop.plan import MeshPlan


def main() -> None:
    """Read an epoch and write the rows/s."""
    out, folder, way, batch = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    rates = {"local": drain_local, "ray": drain_ray}[way](folder, batch)
    out.write_text(json.dumps({"rates": rates, "rows_per_second": sum(rates)}))


def drain_local(folder: Path, batch: int) -> list[float]:
    """Return the rows/s of each rank that reads its own rows."""
    # Spawned, as under torchrun: they share no open files with this process.
    with multiprocessing.get_context("spawn").Pool(CORES) as ranks:
        # Twice: the first run starts the processes and their imports.
        for _ in range(2):
            rates = ranks.map(partial(local_rate, folder, batch), range(CORES), chunksize=1)
    return rates


def local_rate(folder: Path, batch: int, rank: int) -> float:
    """Return the rows/s of one rank that reads its own rows."""
    plan = plan_of(read_dataset(folder), batch=batch, dp=CORES)
    rows = local_stream(plan, MeshPlan(ddp=1, fsdp=CORES, sp=1), rank)
    return rate((len(found.samples) for found in rows if found), of=plan.steps * plan.order.per_rank)


def drain_ray(folder: Path, batch: int) -> list[float]:
    """Return the rows/s of each rank with Ray Data."""
    start_ray()
    plan, drained = plan_of(read_dataset(folder), batch=batch, dp=CORES), ray.remote(num_cpus=0)(split_rate)
    splits = open_splits(plan, plan.start, plan.steps)
    rates: list[float] = ray.get([drained.remote(split, plan) for split in splits])
    return rates


def split_rate(split: DataIterator, plan: StreamPlan) -> float:
    """Return the rows/s of one rank that receives rows from Ray Data's tasks."""
    rows = islice(by_step(split, plan.order.per_rank), plan.steps)
    return rate((len(found.samples) for found in rows), of=plan.steps * plan.order.per_rank)


if __name__ == "__main__":
    main()
