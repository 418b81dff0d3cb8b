"""The frozen weights below adapters: checkpoints name them by a SHA-256, and do not contain them."""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from train_loop.system.input_files import open_input

_THREADS = 4
"""Files that a rank hashes at once."""
_PIECE_BYTES = 2**20


class DrawnWeights:
    """The SHA-256 of random weights, in the order in which they are drawn."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, value: Tensor) -> None:
        """Add a whole tensor on the CPU."""
        self._digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        self._digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    @cached_property
    def sha256(self) -> str:
        """Return the digest of all tensors so far."""
        return self._digest.hexdigest()


def base_sha256(files: Iterable[Path], drawn: DrawnWeights) -> str:
    """Return the SHA-256 of a model's files, by name, and of the weights that rank 0 has drawn.

    A collective call, if there are ranks. Raises DataError for a file that must not be read.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ordered = sorted(files)
    share = ordered[rank::world]
    with ThreadPoolExecutor(_THREADS) as pool:
        own = {file.name: digest for file, digest in zip(share, pool.map(_sha256, share), strict=True)}
    every = [own] * world
    if world > 1:
        dist.all_gather_object(every, own)
    digests = {name: digest for part in every for name, digest in part.items()}
    found = [json.dumps({"files": digests, "drawn": drawn.sha256}, sort_keys=True)]
    if world > 1:
        dist.broadcast_object_list(found, src=0)
    return hashlib.sha256(found[0].encode()).hexdigest()


def _sha256(file: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    with open_input(file) as opened:
        while size := os.readv(opened.fileno(), [buffer]):
            digest.update(buffer[:size])
    return digest.hexdigest()
