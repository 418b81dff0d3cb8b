"""Saves with Lightning Fabric: `torchrun -m benchmarks.peers.fabric_saves OUT FOLDER`."""

import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.checkpoints.blocks import Clock, ends_block, saves_after
from benchmarks.peers import fabric
from benchmarks.workload import Workload
from train_loop.system.exit import leave


def main() -> None:
    """Train, and write the seconds that saves added."""
    out, folder = map(Path, sys.argv[1:3])
    clock = Clock()
    for step, trained in enumerate(fabric.steps(Workload.read(folder), folder), start=1):
        if saves_after(step):
            state = {"model": trained.model, "optimizer": trained.optimizer}
            trained.fabric.save(out.parent / f"fabric-{step}", state)
        if ends_block(step):
            clock.mark()
    clock.write(out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
