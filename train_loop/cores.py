"""How many threads of a rank may compute at once. Torch-free."""

import os


def cores_of_rank() -> int:
    """The cores of this host that its other ranks leave to each; Ray Train and torchrun tell how many there are."""
    return max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
