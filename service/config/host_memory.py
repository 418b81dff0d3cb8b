"""The memory that this service's host or container allows."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def host_memory(process: Path = Path("/proc/self/cgroup"), mounted: Path = _CGROUPS) -> int:
    """Return the bytes that this process may use: the host's memory, or the lowest limit of its control groups."""
    limits = [psutil.virtual_memory().total]
    with suppress(OSError):
        for line in process.read_text().splitlines():
            limits += _limits(line, mounted)
    return min(limits)


def _limits(line: str, mounted: Path) -> Iterator[int]:
    """Yield the memory limits of one line of /proc/PID/cgroup, `NUMBER:CONTROLLERS:PATH`, and of the parent groups."""
    _, controllers, path = line.split(":", 2)
    if controllers not in ("", "memory"):
        return
    root, name = (mounted, "memory.max") if not controllers else (mounted / "memory", "memory.limit_in_bytes")
    # Inside a container the path may be that of the host, while the container's own group is mounted as the root.
    for group in (PurePosixPath(path), *PurePosixPath(path).parents):
        with suppress(OSError, ValueError):
            yield int((root / group.relative_to("/") / name).read_text())
