"""safetensors files written piece by piece, so that no tensor need be in memory whole.

The format: the length of a JSON header as 8 bytes, the header with dtype, shape and place of each tensor, the bytes.
https://huggingface.co/docs/safetensors
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train_loop.checkpoint.saved import Piece
from train_loop.run_dir import sync

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Shard:
    """Tensors that share a file, by name and shape."""

    shapes: Mapping[str, torch.Size]


def plan_shards(shapes: Mapping[str, torch.Size], dtype: torch.dtype, *, limit: int) -> list[Shard]:
    """Deal tensors out to files of at most `limit` bytes, in their order; one that is larger has its own."""
    shards, size = list[dict[str, torch.Size]](), 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if not shards or size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return [Shard(shard) for shard in shards]


class ShardFile:
    """One file, while it is written."""

    def __init__(self, path: Path, shard: Shard, dtype: torch.dtype) -> None:
        self._shard = shard
        self._dtype = dtype
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        for name, shape in shard.shapes.items():
            self._starts[name], end = end, end + math.prod(shape) * dtype.itemsize
            place = [self._starts[name], end]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": place}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._path = path
        self._file = path.open("w+b")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._base + end)

    def put(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write a tensor."""
        shape = self._shard.shapes[name]
        for piece in pieces:
            # FSDP2 cuts tensors along their first dimension, so that a piece is one run of the whole.
            assert piece.values.shape[1:] == shape[1:], f"{name} was cut along another dimension than its first"
            start = (piece.offsets[0] if piece.offsets else 0) * math.prod(shape[1:])
            self._file.seek(self._base + self._starts[name] + start * self._dtype.itemsize)
            self._file.write(piece.values.to(self._dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Make it durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sync(self._path.parent)
