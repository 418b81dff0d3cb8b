"""DCP's description of a checkpoint, unpickled without any class but its own."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from train_loop.errors import CheckpointError

_MODULES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    # The same classes in Python 3.13.
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}
"""The names that DCP's metadata contains, by module; none of them runs code of the file."""


def _memory_format(kind: object, name: object) -> _MEM_FORMAT_ENCODING:
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it reads an attribute of {kind}, which is not part of a checkpoint's metadata")
    return _MEM_FORMAT_ENCODING[str(name)]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of metadata. Raises UnpicklingError for any other name."""
        # Python 3.11.0 to 3.11.3 writes the member of an enumeration as `getattr(class, name)`.
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        allowed = name in _MODULES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a checkpoint's metadata")
        return super().find_class(module, name)


def parse_metadata(content: bytes, path: Path) -> Metadata:
    """Return the metadata in the content of `path`. Raises CheckpointError; code in it never runs."""
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise CheckpointError(f"{path} is not metadata of a checkpoint: {error}; copy the checkpoint again") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not metadata of a checkpoint; copy it again")
    return found
