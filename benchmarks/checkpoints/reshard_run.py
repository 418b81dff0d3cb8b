"""Loads of a checkpoint into the current ranks, alternately by `dcp.load` and by Trainshed's resume.

`torchrun -m benchmarks.checkpoints.reshard_run OUT SPEC RUN_DIR TURNS`. Rank 0 writes OUT: the seconds of dcp.load, of
Trainshed and of SHA-256 alone in every turn, for files on disk and in memory. Both fill the same model and optimizer
from the same files. Trainshed also verifies their SHA-256 sums and selects the checkpoint.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.checkpoint.select import faults_of_share
from train_loop.checkpoint.state_dict import put_back, tensors_of
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.build import Run, build_run
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, default_cache
from train_loop.spec import parse_text
from train_loop.system.exit import leave
from train_loop.system.gc import no_garbage_collection
from train_loop.train import resume


def main() -> None:
    """Load in turn, then write the seconds."""
    out, spec, run_dir, turns = sys.argv[1:]
    dist.init_process_group("gloo")
    job = parse_text(Path(spec).read_bytes())
    directory = RunDir.at(run_dir)
    # Use the epoch of the group that wrote the checkpoints.
    epoch = directory.fence().epoch
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, directory, local_stream, epoch=epoch)
    run = build_run(job, session, find_dataset(job, default_cache()))
    step = max(session.run_dir.manifests())
    with no_garbage_collection():
        # The first load imports modules and fills the optimizer.
        for way in WAYS.values():
            timed(run, step, way)
        found = {place: in_turn(run, step, int(turns), cold=cold) for place, cold in PLACES.items()}
    if session.rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def plainly(run: Run, step: int) -> None:
    """Load as in DCP's tutorials."""
    values = tensors_of(run.state)
    load(values, checkpoint_id=run.session.run_dir.checkpoint(step))
    put_back(run.state, values)


def ours(run: Run, step: int) -> None:
    """Load as a run resumes."""
    resume(run)


def hashes(run: Run, step: int) -> None:
    """Read all files for their SHA-256 sums, as a part of Trainshed's resume."""
    assert faults_of_share(run.session.access, run.session.run_dir, run.session.run_dir.manifests()[step]) == []


WAYS = {"dcp.load": plainly, "Trainshed": ours, "SHA-256 alone": hashes}
PLACES = {"disk": True, "memory": False}


def in_turn(run: Run, step: int, turns: int, *, cold: bool) -> dict[str, list[float]]:
    """Return the seconds of every program; the first one rotates."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(turns):
        first = turn % len(WAYS)
        for name in [*WAYS, *WAYS][first : first + len(WAYS)]:
            found[name].append(timed(run, step, WAYS[name], cold=cold))
    return found


def timed(run: Run, step: int, way: Callable[[Run, int], None], *, cold: bool = False) -> float:
    """Return the seconds until all ranks have loaded the checkpoint."""
    if cold and run.session.rank == 0:
        for file in run.session.run_dir.checkpoint(step).iterdir():
            forget(file)
    dist.barrier()
    started = perf_counter()
    way(run, step)
    dist.barrier()
    return perf_counter() - started


def forget(file: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
    leave()
