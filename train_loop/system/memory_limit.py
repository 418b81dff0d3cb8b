"""The memory limit of a rank under an embedded Ray, and the memory that is left. Torch-free."""

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from train_loop.plan import WORKER_MEMORY_VARIABLE

_GROUP = Path("/sys/fs/cgroup")
_STACK_BYTES = 256 * 2**20
"""Stacks of the threads that a rank has still to start, some 30 of 8 MiB: mapped at once, and nearly unused."""


def is_limited(environment: Mapping[str, str]) -> bool:
    """Return whether this process runs under an embedded Ray, whose jobs have memory limits."""
    return WORKER_MEMORY_VARIABLE in environment


def limit_rank(environment: Mapping[str, str], *, ranks: int, on_gpu: bool, reserved: float | None = None) -> None:
    """Limit the memory that this rank may allocate under an embedded Ray.

    The limit is the memory that the rank has reserved, or its share of the job's memory. An allocation beyond it fails
    in this rank, before the host runs out of memory. CUDA maps more than it uses, so that a rank with a GPU only gets
    back what the head's limit took.
    """
    if not is_limited(environment):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = hard if on_gpu else _most(int(environment[WORKER_MEMORY_VARIABLE]) // ranks, reserved)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _most(share: int, reserved: float | None) -> int:
    """Return the limit of the writable private memory, of which the process has mapped more than it uses."""
    more = share if reserved is None else max(int(reserved) - _status("RssAnon"), 0) + _STACK_BYTES
    return mapped_bytes() + more


def mapped_bytes() -> int:
    """Return the writable private memory of this process, which RLIMIT_DATA counts; 0 if unknown.

    Stacks of threads and arenas count although most of their pages are never used.
    """
    return _status("VmData")


def host_bytes() -> int:
    """Return the memory of this host, or the limit of this container if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):
        limits.append(int((_GROUP / "memory.max").read_text()))
    return min(limits)


def available_bytes() -> int | None:
    """Return the memory that this host and this container have left; None if unknown."""
    limits = [left for left in (_kilobytes("/proc/meminfo", "MemAvailable"),) if left]
    with suppress(OSError, ValueError):
        limits.append(int((_GROUP / "memory.max").read_text()) - int((_GROUP / "memory.current").read_text()))
    return min(limits, default=None)


def _status(name: str) -> int:
    return _kilobytes("/proc/self/status", name)


def _kilobytes(file: str, name: str) -> int:
    """Return the bytes of a line `NAME: NUMBER kB`; 0 if there is none."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
