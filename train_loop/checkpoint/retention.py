"""Which checkpoints stay. Torch-free."""

import shutil
from pathlib import Path

from train_loop.checkpoint.manifest import NAME
from train_loop.run_dir import RunDir, sync_folder


def keep_newest(run_dir: RunDir, count: int) -> None:
    """Remove all committed checkpoints but the newest `count`."""
    for step in sorted(run_dir.manifests())[:-count]:
        remove(run_dir.checkpoint(step))


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a crash in between leaves no half of one that looks whole."""
    (folder / NAME).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)


def remove_leftovers(run_dir: RunDir) -> None:
    """Remove what saves of dead processes left behind uncommitted."""
    for folder in run_dir.checkpoints.glob("step-*.tmp-*"):
        shutil.rmtree(folder)
