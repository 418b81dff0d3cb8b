"""How many threads of a rank may compute at once. Torch-free."""

import os


def cores_of_rank() -> int:
    """The cores of this host that its other ranks leave to each; Ray Train and torchrun tell how many there are."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
