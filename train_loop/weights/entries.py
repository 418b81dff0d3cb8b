"""Entries of state dicts in files that are not safetensors, with their tensors in pieces. No code in a file runs.

A pickle is read by `torch.load` with `weights_only=True` and mapped, one file at a time.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train_loop.checkpoint.export.safetensors import DTYPES, Kind
from train_loop.checkpoint.export.tensors import CheckpointTensors, Piece
from train_loop.errors import UserError
from train_loop.preflight.process.fork_server import lacks_memory
from train_loop.weights.inputs import Inputs

_PIECE_BYTES = 16 * 2**20
_MOST_ENTRIES, _DEEPEST, _LONGEST = 200_000, 8, 256
"""Maximum number of entries, of containers inside each other, and of characters in a key."""
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_INNER = re.compile(r"WeightsUnpickler error:\s*(.*)")
"""Parts of the messages of torch's unpickler."""
Pieces = Callable[[], Iterator[Piece]]


class Entry(NamedTuple):
    """An entry of a state dict that is not a container."""

    path: tuple[str, ...]
    """Keys that lead to it."""
    kind: Kind | None
    """Shape and dtype; None for anything but a tensor that safetensors can hold."""
    what: str
    """Its kind, for messages."""
    memory: Hashable = None
    """Equal for entries that are the same tensor."""
    value: bool | int | float | str | None = None
    """The value of a number or a text."""


def read_entries(inputs: Inputs) -> Iterator[tuple[Entry, Pieces]]:
    """Yield all entries of all files. The pieces of an entry can be read until the next file is.

    Raises UserError for files that are not state dicts, CheckpointError, OSError.
    """
    if inputs.checkpoint is not None:
        yield from _of_checkpoint(inputs.checkpoint)
    for file in inputs.pickles:
        yield from _Walk(file).entries(_load(file), ())


class _Walk:
    """The way through the containers of a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._left = file, _MOST_ENTRIES

    def entries(self, value: Any, path: tuple[str, ...]) -> Iterator[tuple[Entry, Pieces]]:
        """Yield the entries in a value. Raises UserError beyond the limits: dicts may contain each other many times."""
        self._left -= 1
        if self._left < 0:
            raise UserError(f"{self._file} holds over {_MOST_ENTRIES} entries; give the state dict of one model")
        if not isinstance(value, dict):
            yield _entry(value, path, self._file), lambda: _pieces(value)
            return
        if len(path) == _DEEPEST:
            raise UserError(f"{self._file} holds over {_DEEPEST} dicts inside each other; give a plain state dict")
        for key, one in value.items():
            name = key if isinstance(key, str) else f"[{key!r:.20}]"
            if len(name) > _LONGEST:
                raise UserError(f"{self._file} has a key of {len(name)} characters; at most {_LONGEST} are read")
            yield from self.entries(one, (*path, name))


def _entry(value: Any, path: tuple[str, ...], file: Path) -> Entry:
    if type(value) not in (Tensor, nn.Parameter):
        kept = value if isinstance(value, bool | int | float | str) and len(str(value)) <= _LONGEST else None
        return Entry(path, None, f"of type {type(value).__name__}", value=kept)
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.dtype not in DTYPES:
        of = "without values" if value.is_meta else f"of {str(value.layout).removeprefix('torch.')} {value.dtype}"
        return Entry(path, None, f"a tensor {of}")
    where = (value.untyped_storage().data_ptr(), value.storage_offset())
    place = (file, *where, value.shape, value.stride(), value.dtype)
    return Entry(path, Kind(value.shape, value.dtype), "a tensor", place if value.numel() else None)


def _pieces(value: Tensor) -> Iterator[Piece]:
    """Yield a tensor in pieces of whole rows, some megabytes each."""
    values = value.detach()
    if not values.ndim:
        yield Piece((), values)
        return
    row = math.prod(values.shape[1:]) * values.dtype.itemsize
    rows = max(_PIECE_BYTES // max(row, 1), 1)
    for start in range(0, len(values), rows):
        yield Piece((start, *(0 for _ in values.shape[1:])), values[start : start + rows])


def _load(file: Path) -> Any:
    """Return the content of a file of `torch.save`, with tensors mapped. Raises UserError, OSError."""
    with file.open("rb") as opened:
        # torch cannot map its format of before version 1.6.
        mapped = opened.read(len(_ZIP)) == _ZIP
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # a damaged file raises errors of any kind
        if lacks_memory(error):
            raise
        if (found := _GLOBAL.search(str(error))) is not None:
            raise UserError(
                f"{file} holds {found[1]}, which is neither a tensor nor a container of tensors, and its code does not "
                "run; save only the state dict: torch.save(model.state_dict(), FILE)"
            ) from error
        inner = _INNER.search(str(error))
        reason = inner[1] if inner else str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{file} is not a complete file of torch.save: {reason}; copy it again") from error


def _of_checkpoint(folder: Path) -> Iterator[tuple[Entry, Pieces]]:
    # In the Hub's cache, files are links; `find_inputs` has checked them.
    saved = CheckpointTensors(folder, opener=lambda path: path.open("rb"))
    if len(saved.paths) > _MOST_ENTRIES:
        raise UserError(f"{folder} holds over {_MOST_ENTRIES} entries; give the checkpoint of one model")
    saved.check_places()
    for name, path in saved.paths.items():
        if not saved.has(name):
            yield Entry(path, None, "not a tensor"), lambda: iter(())
        elif saved.dtype(name) not in DTYPES:
            yield Entry(path, None, f"a tensor of {saved.dtype(name)}"), lambda: iter(())
        else:
            yield Entry(path, Kind(saved.shape(name), saved.dtype(name)), "a tensor"), _reader(saved, name)


def _reader(saved: CheckpointTensors, name: str) -> Pieces:
    return lambda: saved.pieces(name)
