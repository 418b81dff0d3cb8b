"""The files of one rank in every save: their layout, their copies in memory, and their writer."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train_loop.checkpoint.files.layout import Contents, FileLayout, TensorLocations
from train_loop.checkpoint.files.staging import StagingBuffer
from train_loop.checkpoint.files.writer import FileWriter, OwnWriter, ProcessWriter, write_files
from train_loop.run_dir import CheckpointFile, is_remote, sync
from train_loop.spec import SaveMode
from train_loop.telemetry.timers import StepTimer


class RankWriter:
    """The writer of one rank's files. In mode sync without a GPU it writes tensors in place, otherwise copies."""

    def __init__(self, group: dist.ProcessGroup, mode: SaveMode) -> None:
        copies = mode != "sync" or torch.cuda.is_available()
        self._buffer = StagingBuffer(shared=mode == "process") if copies else None
        self._layout = FileLayout(group, self._buffer)
        shared = self._buffer.descriptor if self._buffer is not None else None
        self._writer: FileWriter = OwnWriter() if shared is None else ProcessWriter(shared)

    def take(self, tensors: dict[str, Any], clock: StepTimer) -> Contents:
        """Return the current values as bytes, valid until the next call. A collective call."""
        return self._layout.take(tensors, clock)

    def write(self, folder: Path, contents: Contents) -> dict[str, CheckpointFile]:
        """Make the files durable. Raises OSError."""
        try:
            files = self._writer.write(folder, contents.files)
            if not is_remote(folder):
                sync(folder)
        except OSError:
            # Delete partial files: they may have filled the disk. Object uploads are atomic.
            if not is_remote(folder):
                for name in contents.files:
                    (folder / name).unlink(missing_ok=True)
            raise
        return files

    def write_metadata(self, path: Path, objects: Iterable[TensorLocations]) -> dict[str, CheckpointFile]:
        """Write DCP's metadata, given the locations of every rank's objects. For rank 0 only. Raises OSError."""
        return write_files(path.parent, {path.name: [memoryview(self._layout.metadata(objects))]})

    def close(self) -> None:
        """Release writer and memory."""
        with ExitStack() as stack:
            if self._buffer is not None:
                stack.callback(self._buffer.close)
            stack.callback(self._writer.close)
