"""safetensors files that are written in pieces, so that no whole tensor must be in memory.

The format: 8 bytes with the length of a JSON header, the header with dtype, shape and location of each tensor, the
data.

https://huggingface.co/docs/safetensors
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from train_loop.checkpoint.export.tensors import Piece
from train_loop.run_dir import sync, write_durably

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names of dtypes in a header."""


class Kind(NamedTuple):
    """The shape and dtype of a tensor in a file."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Shard = Mapping[str, Kind]
"""Tensors that share a file, by name."""


def plan_shards(tensors: Mapping[str, Kind], *, limit: int) -> list[Shard]:
    """Assign tensors to files of at most `limit` bytes, in order; a larger tensor has its own file."""
    shards, size = list[dict[str, Kind]](), 0
    for name, kind in tensors.items():
        if not shards or size + kind.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = kind
        size += kind.nbytes
    return list[Shard](shards)


def file_names(shards: Sequence[Shard], stem: str = "model") -> list[str]:
    """Return the name of each file, as transformers names them."""
    if len(shards) == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]


def write_index(folder: Path, shards: Sequence[Shard], stem: str = "model") -> None:
    """Write the index of several files; a single file needs none."""
    if len(shards) == 1:
        return
    files = {name: file for file, shard in zip(file_names(shards, stem), shards, strict=True) for name in shard}
    size = sum(kind.nbytes for shard in shards for kind in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_durably(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2))


class ShardFile:
    """A safetensors file during its creation."""

    def __init__(self, path: Path, shard: Shard) -> None:
        self._shard = shard
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        for name, kind in shard.items():
            self._starts[name], end = end, end + kind.nbytes
            place = [self._starts[name], end]
            header[name] = {"dtype": DTYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": place}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._path = path
        self._file = path.open("w+b")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._base + end)

    def put(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write the pieces of a tensor."""
        shape, dtype = self._shard[name]
        for piece in pieces:
            # Pieces are whole rows, so that each is contiguous in the whole tensor.
            assert piece.values.shape[1:] == shape[1:], f"{name} was cut along another dimension than its first"
            start = (piece.offsets[0] if piece.offsets else 0) * math.prod(shape[1:])
            self._file.seek(self._base + self._starts[name] + start * dtype.itemsize)
            self._file.write(piece.values.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Make the file durable and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sync(self._path.parent)
