"""Small committed checkpoints of tensors, in DCP's format, written without ranks."""

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from service.adapters.helper_processes.checkpoints import HelperTools
from service.ports import Cancellation, Digests, TensorDigest
from tests.support.builders.checkpoints import manifest
from train_loop.checkpoint.digest import digest_step
from train_loop.checkpoint.manifest import describe_file
from train_loop.checkpoint.store.open import open_store
from train_loop.run_dir import Fence, RunDir


def tensor_checkpoint(run_dir: RunDir, step: int, values: dict[str, Any], *, crc: bool = False) -> Path:
    """Write a committed checkpoint of nested values, and return its folder.

    With `crc`, tensors have the CRC that `torch.save` writes by default and Trainshed's own writer does not.
    """
    store = open_store(run_dir, Fence(1, 0))
    folder = store.workplace(step)
    with warnings.catch_warnings():
        # DCP warns that it saves in a single process.
        warnings.simplefilter("ignore")
        before = get_crc32_options()
        set_crc32_options(crc)
        try:
            save(values, storage_writer=FileSystemWriter(folder), no_dist=True)
        finally:
            set_crc32_options(before)
    files = {file.name: describe_file(file) for file in folder.iterdir()}
    store.commit(manifest(step).model_copy(update={"files": files}))
    return run_dir.checkpoint(step)


def digests_in_process(_: HelperTools, run_dir: str, step: int, cancellation: Cancellation) -> Digests | None:
    """Return the digests of a checkpoint like `HelperTools.digests`, without its process, which imports torch."""
    found = digest_step(RunDir.at(run_dir), step)
    if found is None:
        return None
    tensors = {name: TensorDigest(one.dtype, tuple(one.shape), one.sha256) for name, one in found.tensors.items()}
    return Digests(tuple(found.faults), found.sha256, tensors)
