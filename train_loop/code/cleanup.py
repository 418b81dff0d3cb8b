"""Use and removal of the folders with unpacked packages, which all processes of a user on a host share.

Each process that imports from a folder holds a shared lock on the file `<SHA-256>.lock` next to it until it ends. A
folder without such a process is unused, and goes if there are newer ones, or if `trainshed down` has ended the jobs.
"""

import fcntl
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

KEPT = 8
"""Number of unused packages that stay on a host: the next attempt of a job needs no new copy."""
_LEFT_SECONDS = 7 * 86400.0
"""Age at which a folder without a lock file is removed: an older version, or a process that has died, left it."""
_LOCK = ".lock"
_used: dict[Path, int] = {}
"""Lock files that this process holds, by folder."""


def hold(folder: Path) -> None:
    """Keep a package's folder, which need not exist yet, from being removed until this process ends."""
    lock = folder.with_name(folder.name + _LOCK)
    while folder not in _used:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_at(descriptor, lock):
            # The check of own code may write files, and not set their times.
            os.pwrite(descriptor, b"\0", 0)
            _used[folder] = descriptor
        else:
            # Another process has removed the unused package meanwhile.
            os.close(descriptor)


def is_private(home: Path) -> bool:
    """Return whether a folder that exists is a folder of this user alone: others may create names in /tmp."""
    found = home.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def remove_unused(home: Path, *, keep: int = KEPT) -> None:
    """Remove the packages that no process uses, except the `keep` newest ones; nothing in a folder of other users."""
    with suppress(FileNotFoundError):
        if not is_private(home):
            return
        entries = [(entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)) for entry in os.scandir(home)]
        locks = [path for _, path in sorted(entries, reverse=True) if path.suffix == _LOCK]
        names = {path.stem for path in locks}
        unused = 0
        for lock in locks:
            unused += _remove_unless_used(lock, keep=unused < keep)
        for at, path in entries:
            if path.suffix != _LOCK and path.name not in names and time.time() - at > _LEFT_SECONDS:
                remove(path)


def _remove_unless_used(lock: Path, *, keep: bool) -> bool:
    """Return whether no process uses the package of a lock file; remove it then unless `keep`."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not keep and _is_at(descriptor, lock):
            remove(lock.with_suffix(""))
            lock.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def remove(folder: Path) -> None:
    """Remove a folder whose files and folders are read-only; do nothing if it is missing."""
    for place in (folder, *folder.rglob("*")):
        with suppress(OSError):
            if stat.S_ISDIR(place.lstat().st_mode):
                place.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
