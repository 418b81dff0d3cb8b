"""Folders of the cache: built by one job at a time, and there whole or not at all."""

import errno
import math
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from train_loop.data.prepare.progress import Report
from train_loop.run_dir import make_folder, sync

_LOOK_SECONDS = 0.5
_ABANDONED_SECONDS = 6 * 3600.0
"""After so long without a change, a half-built folder of another host is of a process that is gone."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def build_once(folder: Path, build: Callable[[Path], None], *, is_whole: Callable[[], bool], report: Report) -> None:
    """Have `build` fill a folder that gets its final name by one rename, unless it `is_whole` already.

    Who comes second waits for the first. The lock dies with the process that holds it and only saves work: on storage
    that has no locks both build, and one rename wins.
    """
    if is_whole():
        return
    make_folder(folder.parent)
    with _locked(folder, report) as locked:
        if is_whole():
            return
        work = folder.with_name(f"{folder.name}.tmp-{socket.gethostname()}-{uuid.uuid4().hex}")
        work.mkdir()
        try:
            _remove_leftovers(work, own=f"{folder.name}.tmp-{socket.gethostname()}-" if locked else None)
            build(work)
            sync(work)
            _commit(work, folder, is_whole)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(folder: Path, report: Report) -> Iterator[bool]:
    """Whether nobody else holds the lock; False where the storage has none."""
    # Without its fallback to a file that would outlive a killed process.
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("waiting_for_preparation", folder=str(folder))
            lock.acquire(poll_interval=_LOOK_SECONDS)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        report("warning", message=f"{folder.parent} has no file locks: jobs that prepare the same both do the work")
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _commit(work: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    if folder.exists() and not is_whole():
        # Somebody has deleted or cut short what lies there: it is of no use to anyone.
        shutil.rmtree(folder)
    try:
        work.rename(folder)
    except OSError:
        if not is_whole():
            raise
    sync(folder.parent)


def _remove_leftovers(work: Path, *, own: str | None) -> None:
    """Remove what processes that were killed have left half-built.

    Those whose names begin with `own` at once: their builder held the lock that is ours now. Others after six hours
    without a change, whatever they were to become: the host of a pod that is gone never comes back.
    """
    # Both times are the file server's.
    now = _newest(work)
    for left in work.parent.glob("*.tmp-*"):
        mine = own is not None and left.name.startswith(own)
        if left != work and (mine or now - _newest(left) > _ABANDONED_SECONDS):
            shutil.rmtree(left, ignore_errors=True)


def _newest(folder: Path) -> float:
    """Return when something in a folder last changed, in Unix seconds; infinity if it goes away meanwhile."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return math.inf
