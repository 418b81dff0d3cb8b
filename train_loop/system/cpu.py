"""Number of CPU cores per rank. Torch-free."""

import os


def cores_of_rank() -> int:
    """Return this host's usable cores per rank, at least 1. Ray Train and torchrun set LOCAL_WORLD_SIZE."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
