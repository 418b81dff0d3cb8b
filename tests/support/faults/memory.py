"""Memory cgroups, with which the kernel really kills a process for lack of memory."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
_KINDS = (
    (_ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    (_ROOT, "memory.max", "memory.current"),
)
"""The mount points of cgroups of version 1 and 2, with their files of limit and usage."""


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup, initially without a limit."""

    folder: Path
    limit: str
    usage: str

    def add(self, pid: int) -> None:
        """Move a process into the group. Memory that it already uses does not count."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def allow(self, more: int) -> None:
        """Limit the group to its present usage plus a number of bytes."""
        (self.folder / self.limit).write_text(str(int((self.folder / self.usage).read_text()) + more))


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Yield a separate memory cgroup; skip the test if none can be created."""
    for root, limit, usage in _KINDS:
        folder = root / f"trainshed-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                yield MemoryGroup(folder, limit, usage)
                return
        finally:
            for pid in (folder / "cgroup.procs").read_text().split():
                (root / "cgroup.procs").write_text(pid)
            folder.rmdir()
    pytest.skip("a memory cgroup needs root and a cgroup file system that is writable")
