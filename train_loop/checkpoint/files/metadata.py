"""Pickles in a checkpoint, read with the classes of a save only: no code of a file ever runs."""

import io
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
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


_OF_GENERATORS = {
    "torch._utils": ("_rebuild_tensor_v2",),
    "collections": ("OrderedDict",),
    "numpy": ("ndarray", "dtype"),
    "numpy._core.multiarray": ("_reconstruct",),
    # The same function before numpy 2.
    "numpy.core.multiarray": ("_reconstruct",),
}
"""The names that the states of torch's, Python's and numpy's generators contain."""
_REPLACED: dict[tuple[str, str], Callable[..., Any]] = {
    # Python 3.11.0 to 3.11.3 writes the member of an enumeration as `getattr(class, name)`.
    ("builtins", "getattr"): _memory_format,
    # torch's function unpickles any class.
    ("torch.storage", "_load_from_bytes"): lambda content: torch.load(io.BytesIO(content), weights_only=True),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, modules: Mapping[str, Collection[str]]) -> None:
        super().__init__(io.BytesIO(content))
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the list. Raises UnpicklingError for any other name."""
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        allowed = name in self._modules.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a checkpoint's metadata")
        return super().find_class(module, name)


def parse_metadata(content: bytes, path: Path) -> Metadata:
    """Return the metadata in the content of `path`. Raises CheckpointError; code in it never runs."""
    with _damage_of(f"{path} is not metadata of a checkpoint"):
        found = _Unpickler(content, _MODULES).load()
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not metadata of a checkpoint; copy it again")
    for name in {place.relative_path for place in (found.storage_data or {}).values()}:
        if name in ("", ".", "..") or Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r} outside its folder; copy the checkpoint again")
    return found


def parse_generators(content: bytes) -> dict[str, Any]:
    """Return the states of a rank's random generators. Raises CheckpointError; code in them never runs."""
    with _damage_of("the checkpoint's random generators cannot be read"):
        found: dict[str, Any] = _Unpickler(content, _OF_GENERATORS).load()
    return found


def check_plain(content: bytes, folder: Path) -> None:
    """Raise CheckpointError if an object of `torch.save` has other classes than tensors and plain containers."""
    with _damage_of(f"{folder} has an entry that is not plain data"):
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


@contextmanager
def _damage_of(what: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise CheckpointError(f"{what}: {error}; copy the checkpoint again") from error
