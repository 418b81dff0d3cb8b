"""Atomic creation of cache folders: one job builds a folder, the others wait, and it appears only when complete."""

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

_POLL_SECONDS = 0.5
_ABANDONED_SECONDS = 6 * 3600.0
"""Seconds without a change after which a temporary folder of another host counts as abandoned."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def build_once(folder: Path, build: Callable[[Path], None], *, is_whole: Callable[[], bool], report: Report) -> None:
    """Fill a folder with `build` and give it its final name by one rename; do nothing if `is_whole` returns True.

    Concurrent callers wait for the first one. The lock ends with the process that holds it. It only avoids duplicate
    work: on storage without locks several callers build, and one rename wins.
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
            with _naming(folder.parent):
                build(work)
            sync(work)
            _commit(work, folder, is_whole)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Name a folder in errors of storage that name no file, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(folder)
        raise


@contextmanager
def _locked(folder: Path, report: Report) -> Iterator[bool]:
    """Hold the folder's lock in the body, and yield True; yield False if the storage has no file locks."""
    # No fallback to a soft lock: its file would outlive a killed process.
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("waiting_for_preparation", folder=str(folder))
            lock.acquire(poll_interval=_POLL_SECONDS)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        report("warning", message=f"{folder.parent} has no file locks: jobs that prepare the same data each build it")
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _commit(work: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    if folder.exists() and not is_whole():
        # Some of its files were deleted or truncated, so it is unusable.
        shutil.rmtree(folder)
    try:
        work.rename(folder)
    except OSError:
        if not is_whole():
            raise
    sync(folder.parent)


def _remove_leftovers(work: Path, *, own: str | None) -> None:
    """Remove temporary folders that killed processes left behind.

    Folders whose names begin with `own` are removed at once: this process now holds their builder's lock. Other folders
    are removed after six hours without a change: the host name of a deleted pod never returns.
    """
    # Both times come from the file server's clock.
    now = _newest(work)
    for left in work.parent.glob("*.tmp-*"):
        mine = own is not None and left.name.startswith(own)
        if left != work and (mine or now - _newest(left) > _ABANDONED_SECONDS):
            shutil.rmtree(left, ignore_errors=True)


def _newest(folder: Path) -> float:
    """Return the latest modification time in a folder, in Unix seconds; infinity if the folder disappears meanwhile."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return math.inf
