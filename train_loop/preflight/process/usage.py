"""Disk space, shared memory and threads of a process that runs users' code, as its parent sees them in /proc."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LARGEST_FILE = 256 * 2**20
"""Maximum bytes of a file that users' code may write."""
_MOST_BYTES = 2**30
"""Maximum bytes of all files."""
_LEAST_BYTES = 64 * 2**10
"""Bytes that a file or folder counts at least, so that their number is limited, too."""
_MOST_THREADS = 256


def excess(process: int, folder: Path, memory_bytes: int | None) -> str | None:
    """Return what a process does that its limits forbid; None if it keeps them or has ended.

    Without seccomp, code may stop itself and use shared memory.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        status = _status(process)
        if status.get("State", "")[:1] == "T":
            return "was stopped by the code"
        if int(status.get("Threads", 1)) > _MOST_THREADS:
            return f"started over {_MOST_THREADS} threads"
        if memory_bytes and int(status.get("RssShmem", "0").split()[0]) * 1024 > memory_bytes:
            return f"took over {memory_bytes >> 20} MiB of shared memory"
        if _is_over(_sizes(process, folder)):
            return f"wrote over {_MOST_BYTES >> 20} MiB of files"
    return None


def _status(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _is_over(sizes: Iterator[int]) -> bool:
    total = 0
    for size in sizes:
        total += size
        if total > _MOST_BYTES:
            return True
    return False


def _sizes(process: int, folder: Path) -> Iterator[int]:
    """Yield the sizes of the files in a folder, and of deleted ones that the process still has."""
    yield from _in_folder(folder)
    deleted = set[int]()
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):
            found = os.stat(f"/proc/{process}/fd/{descriptor}")
            if stat.S_ISREG(found.st_mode) and not found.st_nlink and found.st_ino not in deleted:
                deleted.add(found.st_ino)
                yield _size(found)
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if line.endswith("(deleted)") and f" {folder}/" in line and (inode := int(line.split()[4])) not in deleted:
            deleted.add(inode)
            # Only root can ask for its size.
            yield LARGEST_FILE


def _in_folder(folder: Path) -> Iterator[int]:
    folders = [str(folder)]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                with suppress(FileNotFoundError):
                    yield _size(entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            # Its path is too long, or its mode keeps this process out.
            yield _MOST_BYTES + 1


def _size(found: os.stat_result) -> int:
    return max(found.st_blocks * 512, _LEAST_BYTES)


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, at any depth and with any mode."""
    number, rest = 0, [folder]
    while rest:
        place = rest.pop()
        for entry in os.scandir(place):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            # The paths of deep folders would be too long.
            number += 1
            rest.append(folder.parent / f"{folder.name}.{number}")
            os.chmod(entry.path, 0o700)
            os.rename(entry.path, rest[-1])
        place.rmdir()
