"""Which checkpoints stay. Torch-free."""

import shutil
from pathlib import Path

from train_loop.checkpoint.manifest import NAME
from train_loop.run_dir import RunDir, sync


def keep_newest(run_dir: RunDir, count: int) -> None:
    """Remove all committed checkpoints but the newest `count`."""
    for step in sorted(run_dir.manifests())[:-count]:
        remove(run_dir.checkpoint(step))


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a crash in between leaves nothing that looks like one."""
    (folder / NAME).unlink(missing_ok=True)
    sync(folder)
    shutil.rmtree(folder)


def put_aside(folder: Path, attempt: int) -> None:
    """Take a checkpoint that was rejected out of the ledger, and keep its files for whoever wants to know why."""
    aside = folder.with_name(f"{folder.name}.rejected-{attempt}")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    sync(folder.parent)


def remove_leftovers(run_dir: RunDir, attempt: int) -> None:
    """Remove what dead processes of this attempt, or of an older one, left half saved or half removed."""
    for folder in run_dir.checkpoints.glob("step-*"):
        _, unfinished, owner = folder.name.partition(".tmp-")
        if int(owner) <= attempt if unfinished else not (folder / NAME).exists():
            shutil.rmtree(folder)
