"""Loading a checkpoint into the ranks that there are, by `dcp.load` and by our resume in turn.

`torchrun -m benchmarks.reshard_run OUT SPEC RUN_DIR TURNS`. Rank 0 writes OUT: [seconds of dcp.load, seconds of ours]
for every turn. Both fill the same model and optimizer from the same files, which are in the page cache; ours reads them
once more for their SHA-256 and decides which checkpoint it is.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.assemble import Run, build_run
from train_loop.checkpoint.contents import put_back, tensors_of
from train_loop.checkpoint.load import restore
from train_loop.data.cache import default_cache, find_dataset
from train_loop.data.reader import local_stream
from train_loop.garbage import no_garbage_collection
from train_loop.leave import leave
from train_loop.run_dir import RunDir
from train_loop.session import Session
from train_loop.spec import parse_text


def main() -> None:
    """Load in turn, then write."""
    out, spec, run_dir, turns = sys.argv[1:]
    dist.init_process_group("gloo")
    job = parse_text(Path(spec).read_bytes())
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir.at(run_dir), local_stream)
    run = build_run(job, session, find_dataset(job, default_cache()))
    step = max(session.run_dir.manifests())
    with no_garbage_collection():
        found = [(timed(run, step, plainly=True), timed(run, step, plainly=False)) for _ in range(int(turns) + 1)]
    if session.rank == 0:
        # The first of both imports, and fills the optimizer.
        Path(out).write_text(json.dumps(found[1:]))
    dist.barrier()
    dist.destroy_process_group()


def timed(run: Run, step: int, *, plainly: bool) -> float:
    """Seconds until all ranks have the checkpoint."""
    dist.barrier()
    started = perf_counter()
    if plainly:
        values = tensors_of(run.state)
        load(values, checkpoint_id=run.session.run_dir.checkpoint(step))
        put_back(run.state, values)
    else:
        restore(replace(run))
    dist.barrier()
    return perf_counter() - started


if __name__ == "__main__":
    main()
    leave()
