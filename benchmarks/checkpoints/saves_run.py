"""The bare loop with saves in every second block of steps.

Run as `torchrun -m benchmarks.checkpoints.saves_run OUT FOLDER WAY`.

A save contains model and optimizer, as in DCP's tutorials. Trainshed saves the same with its Saver.
"""

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.checkpoints.blocks import Clock, ends_block, saves_after
from benchmarks.peers import bare
from benchmarks.workload import Workload
from train_loop.checkpoint.save import Saver
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import DataPosition, Manifest, RunDir
from train_loop.spec import CheckpointSpec, SaveMode
from train_loop.system.exit import leave
from train_loop.telemetry.timers import StepTimer


class Way(Protocol):
    """A method to save checkpoints."""

    def save(self, values: dict[str, Any], step: int) -> None:
        """Start a save, after any save in flight has finished."""

    def wait(self) -> None:
        """Wait until the last save is durable."""


class Sync:
    """`dcp.save`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, values: dict[str, Any], step: int) -> None:
        """Save synchronously."""
        save(values, checkpoint_id=self._folder / str(step))

    def wait(self) -> None:
        """Return at once: no save is in flight."""


class Async:
    """`dcp.async_save` with its defaults."""

    def __init__(self, folder: Path, kind: AsyncCheckpointerType) -> None:
        self._folder = folder
        self._kind = kind
        self._group = dist.new_group(backend="gloo")
        self._pending: Any = None

    def save(self, values: dict[str, Any], step: int) -> None:
        """Copy the values, and write them in the background."""
        self.wait()
        self._pending = async_save(
            values,
            checkpoint_id=self._folder / str(step),
            process_group=self._group,
            async_checkpointer_type=self._kind,
        )

    def wait(self) -> None:
        """Wait until the last save is written."""
        if self._pending is not None:
            assert isinstance(self._pending, Future)
            self._pending.result()
            self._pending = None


class Ours:
    """Trainshed's Saver, with hashes, a commit and synced folders."""

    def __init__(self, folder: Path, mode: SaveMode) -> None:
        self._run_dir = RunDir(folder)
        session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, self._run_dir, local_stream)
        # Keep all checkpoints, as the other methods do.
        self._saver = Saver(session.access, CheckpointSpec(keep_last=1000), mode)

    def save(self, values: dict[str, Any], step: int) -> None:
        """Copy the values, and write them in the background."""
        draft = Manifest(
            step=step,
            tokens=0,
            position=DataPosition(),
            attempt=1,
            time=0.0,
            fingerprint="",
            dataset="",
            world=dist.get_world_size(),
            mesh={},
            versions={},
            files={},
        )
        self._saver.save(values, draft, StepTimer())

    def wait(self) -> None:
        """Wait until the last save is committed."""
        fault = self._saver.wait()
        assert fault is None, fault


WAYS: dict[str, Callable[[Path], Way]] = {
    "dcp.save": Sync,
    "dcp.async_save, thread": partial(Async, kind=AsyncCheckpointerType.THREAD),
    "dcp.async_save, process": partial(Async, kind=AsyncCheckpointerType.PROCESS),
    "Trainshed, sync": partial(Ours, mode="sync"),
    "Trainshed, thread": partial(Ours, mode="thread"),
    "Trainshed, process": partial(Ours, mode="process"),
}


def main() -> None:
    """Train, and write the seconds that saves added."""
    out, folder = map(Path, sys.argv[1:3])
    dist.init_process_group("gloo")
    workload = Workload.read(folder)
    names = [tempfile.mkdtemp(dir=out.parent) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    way = WAYS[sys.argv[3]](Path(str(names[0])))
    built, clock = bare.build(workload, folder), Clock()
    for step, _ in enumerate(bare.steps(workload, folder, built), start=1):
        if saves_after(step):
            way.save(values_of(built), step)
        if ends_block(step):
            way.wait()
            clock.mark()
    clock.write(out)
    dist.barrier()
    dist.destroy_process_group()


def values_of(built: bare.Bare) -> dict[str, Any]:
    """Return model and optimizer in DCP's format."""
    model, optimizer = get_state_dict(built.model, built.optimizer)
    return {"model": model, "optimizer": optimizer}


if __name__ == "__main__":
    main()
    leave()
