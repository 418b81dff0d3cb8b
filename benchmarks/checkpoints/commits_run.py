"""Consecutive checkpoints without training in between: `torchrun -m benchmarks.checkpoints.commits_run OUT FOLDER WAY`.

Writes the MB/s of each durable checkpoint except the first, which also plans the save.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from benchmarks.checkpoints.saves_run import WAYS, values_of
from benchmarks.peers import bare
from benchmarks.workload import Workload
from train_loop.system.exit import leave

TURNS = 5


def main() -> None:
    """Save repeatedly, and write the speeds."""
    out, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    workload = Workload.read(folder)
    places = [tempfile.mkdtemp(dir=out.parent) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(places)
    place = Path(str(places[0]))
    way, built = WAYS[name](place), bare.build(workload, folder)
    # One step creates the optimizer's moments.
    next(iter(bare.steps(workload, folder, built)))
    found = []
    for turn in range(TURNS + 1):
        values = values_of(built)
        dist.barrier()
        start = perf_counter()
        way.save(values, turn + 1)
        way.wait()
        dist.barrier()
        seconds = perf_counter() - start
        if dist.get_rank() == 0:
            found.append(_bytes_below(place) / 1e6 / seconds)
            for left in [*place.glob("[0-9]*"), *place.glob("checkpoints/step-*")]:
                shutil.rmtree(left)
        dist.barrier()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found[1:]))
    dist.destroy_process_group()


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
    leave()
