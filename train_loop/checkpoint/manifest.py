"""Verification of checkpoints: a manifest must match every file. Torch-free.

`python -m train_loop.checkpoint.manifest RUN_DIR --step N` reads all files of a checkpoint and prints their faults.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from train_loop.checkpoint.store.base import METADATA
from train_loop.errors import CheckpointError, UserError
from train_loop.run_dir import (
    CheckpointFile,
    IrregularFileError,
    Manifest,
    RunDir,
    is_remote,
    open_file,
    read_whole,
    size_of,
)
from train_loop.system.cpu import cores_of_rank

NAME = "manifest.json"
T = TypeVar("T")


def home_of(folder: Path) -> Path:
    """Return the run directory of a checkpoint's folder; the folder itself if another program wrote it."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def open_checkpoint_file(path: Path) -> BufferedReader:
    """Open a file in a checkpoint's folder. Raises IrregularFileError, OSError."""
    return open_file(path, below=home_of(path.parent))


def describe_file(path: Path) -> CheckpointFile:
    """Return the current size and SHA-256 of a file. Raises IrregularFileError, OSError."""
    with open_checkpoint_file(path) as file:
        size = path.stat().st_size if is_remote(path) else os.fstat(file.fileno()).st_size
        return CheckpointFile(size=size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def verify(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Return the faults of a checkpoint's files, or of the named ones; empty if all sizes and hashes match.

    Raises OSError, or an error of fsspec's packages, if storage fails: then the checkpoint may still be intact.
    """
    faults = _check_each(manifest.files if names is None else names, partial(_fault, folder, manifest))
    return [fault for fault in faults if fault is not None]


def _check_each(names: Iterable[str], check: Callable[[str], T]) -> list[T]:
    # More threads than cores: some wait for storage while others hash.
    with ThreadPoolExecutor(2 * cores_of_rank()) as pool:
        return list(pool.map(check, names))


def _fault(folder: Path, manifest: Manifest, name: str) -> str | None:
    path, expected = folder / name, manifest.files.get(name)
    if expected is None:
        return f"{name} is not one of the committed files"
    try:
        size = size_of(path, below=home_of(folder))
        if size is None:
            return f"{name} is missing"
        if size != expected.size:
            return f"{name} has {size} bytes, not {expected.size}"
        return None if describe_file(path) == expected else f"{name} has another SHA-256 than when it was committed"
    except IrregularFileError as error:
        return str(error)


def has_its_files(folder: Path, manifest: Manifest) -> bool:
    """Return whether all files exist with their sizes, without reading them."""
    below = home_of(folder)
    return all(
        _check_each(manifest.files, lambda name: size_of(folder / name, below=below) == manifest.files[name].size)
    )


def metadata_name(manifest: Manifest) -> str:
    """Return the name of the file with DCP's metadata. Raises FileNotFoundError."""
    for name in manifest.files:
        if name.endswith(METADATA):
            return name
    raise FileNotFoundError(f"the checkpoint of step {manifest.step} has no file {METADATA}")


def metadata_file(folder: Path) -> Path:
    """Return the path of DCP's metadata in a committed checkpoint. Raises FileNotFoundError, ValueError."""
    if not is_remote(folder):
        return folder / METADATA
    return folder / metadata_name(Manifest.parse(read_whole(folder / NAME, below=home_of(folder)).decode()))


def newest_verified(run_dir: RunDir) -> tuple[Manifest | None, dict[int, list[str]]]:
    """Return the newest checkpoint whose files verify, and the faults of newer checkpoints by step."""
    rejected: dict[int, list[str]] = {}
    for step, manifest in sorted(run_dir.manifests().items(), reverse=True):
        faults = verify(run_dir.checkpoint(step), manifest)
        if not faults:
            return manifest, rejected
        rejected[step] = faults
    return None, rejected


def find(run_dir: RunDir, step: int) -> Manifest:
    """Return the manifest of a step, without verification. Raises UserError if there is none."""
    manifests = run_dir.manifests()
    if step not in manifests:
        raise UserError(
            f"checkpoint of step {step} not found; available steps: {', '.join(map(str, manifests)) or 'none'}"
        )
    return manifests[step]


def find_verified(run_dir: RunDir, step: int) -> Manifest:
    """Return the manifest of a step after reading all its files. Raises UserError if there is none, CheckpointError."""
    manifest = find(run_dir, step)
    faults = verify(run_dir.checkpoint(step), manifest)
    if faults:
        raise CheckpointError(
            f"the checkpoint of step {step} is damaged: {'; '.join(faults)}; choose another checkpoint"
        )
    return manifest


def main() -> None:
    """Print the faults of a checkpoint as a JSON list; print null if the step has no checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.checkpoint.manifest", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--step", type=int, required=True)
    arguments = parser.parse_args()
    run_dir = RunDir.at(arguments.run_dir)
    manifest = run_dir.manifests().get(arguments.step)
    faults = manifest and verify(run_dir.checkpoint(arguments.step), manifest)
    if faults and run_dir.manifests().get(arguments.step) != manifest:
        # Retention removed it while it was read.
        faults = None
    print(json.dumps(faults))


if __name__ == "__main__":
    main()
