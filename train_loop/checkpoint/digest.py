"""Digests of a checkpoint's tensors, which do not depend on the number of ranks that wrote it.

`python -m train_loop.checkpoint.digest RUN_DIR --step N` verifies all files of a checkpoint, and prints the SHA-256 of
each weight, optimizer state and average. Random generators belong to ranks and have no digest.
"""

import argparse
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from train_loop.checkpoint.export.tensors import CheckpointTensors
from train_loop.checkpoint.manifest import verify
from train_loop.run_dir import RunDir
from train_loop.system.cpu import cores_of_rank


class TensorDigest(NamedTuple):
    """A tensor's dtype, shape, and SHA-256 over both and its bytes in row-major order."""

    dtype: str
    shape: list[int]
    sha256: str


class Digests(NamedTuple):
    """The digests of a checkpoint, or the faults of its files."""

    faults: list[str]
    sha256: str
    """SHA-256 over the names and digests of all tensors."""
    tensors: dict[str, TensorDigest]


def digest_checkpoint(folder: Path) -> Digests:
    """Return the digests of a verified checkpoint: its metadata is unpickled. Raises CheckpointError, OSError.

    Holds some megabytes per core in memory.
    """
    tensors = CheckpointTensors(folder)
    with ThreadPoolExecutor(cores_of_rank()) as pool:
        found = dict(zip(tensors.names, pool.map(partial(digest_tensor, tensors), tensors.names), strict=True))
    whole = hashlib.sha256()
    for name, digest in found.items():
        whole.update(f"{name} {digest.sha256}\n".encode())
    return Digests([], whole.hexdigest(), found)


def digest_tensor(tensors: CheckpointTensors, name: str) -> TensorDigest:
    """Return the digest of a tensor. Raises CheckpointError, OSError."""
    dtype, shape = str(tensors.dtype(name)).removeprefix("torch."), list(tensors.shape(name))
    digest = hashlib.sha256(f"{dtype} {shape}\n".encode())
    for part in tensors.row_major_bytes(name):
        digest.update(part)
    return TensorDigest(dtype, shape, digest.hexdigest())


def digest_step(run_dir: RunDir, step: int) -> Digests | None:
    """Return the digests or faults of a step's checkpoint; None if it does not exist. Raises CheckpointError, OSError.

    All files are verified first, because metadata must not be unpickled otherwise.
    """
    manifest = run_dir.manifests().get(step)
    if manifest is None:
        return None
    try:
        faults = verify(run_dir.checkpoint(step), manifest)
        found = Digests(faults, "", {}) if faults else digest_checkpoint(run_dir.checkpoint(step))
    except FileNotFoundError:
        if run_dir.manifests().get(step) == manifest:
            raise
        return None
    # Retention may remove files while they are read.
    return None if faults and run_dir.manifests().get(step) != manifest else found


def main() -> None:
    """Print the digests or faults of a checkpoint as JSON; print null if the step has no checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.checkpoint.digest", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    arguments = parser.parse_args()
    found = digest_step(RunDir.at(arguments.run_dir), arguments.step)
    tensors = {name: one._asdict() for name, one in found.tensors.items()} if found else {}
    print(json.dumps(found and found._asdict() | {"tensors": tensors}))


if __name__ == "__main__":
    main()
