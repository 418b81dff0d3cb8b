"""The memory limit of a rank under an embedded Ray. Torch-free."""

import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from train_loop.plan import WORKER_MEMORY_VARIABLE


def limit_rank(environment: Mapping[str, str], *, ranks: int, on_gpu: bool) -> None:
    """Limit the memory that this rank may allocate to its share of the job's memory, if the variable is set.

    An allocation beyond it fails in this rank, before the host runs out of memory. CUDA maps more than it uses, so that
    a rank with a GPU only gets back what the head's limit took.
    """
    if (memory := environment.get(WORKER_MEMORY_VARIABLE)) is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = hard if on_gpu else reserved_bytes() + int(memory) // ranks
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def reserved_bytes() -> int:
    """Return the writable private memory of this process, which RLIMIT_DATA counts; 0 if unknown.

    Stacks of threads and arenas count although most of their pages are never used.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0
