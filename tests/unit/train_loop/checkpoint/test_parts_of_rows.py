"""Tensors of which ranks hold parts of rows: exports and whole tensors have each part at its place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from train_loop.checkpoint.export.huggingface import _write_shard
from train_loop.checkpoint.export.safetensors import Kind
from train_loop.checkpoint.export.tensors import Piece, whole
from train_loop.model.families.family import Unchanged

VALUES = torch.arange(30, dtype=torch.float32).view(5, 6)
PLACES = ((0, 0, 3, 4), (3, 0, 5, 4), (0, 4, 3, 6), (3, 4, 5, 6), (3, 4, 5, 6))
"""First and last rows and columns of four parts, of which one has a replica."""
PIECES = [Piece((top, left), VALUES[top:bottom, left:right]) for top, left, bottom, right in PLACES]


def test_parts_of_rows_are_exported_at_their_place(tmp_path: Path) -> None:
    saved, path = SimpleNamespace(pieces=lambda name: iter(PIECES)), tmp_path / "model.safetensors"
    source: Any = SimpleNamespace(saved=saved, parts={"w": Unchanged("w", (5, 6))}, names={"w": "model.w"})
    progress: Any = SimpleNamespace(counted=lambda pieces: pieces)
    _write_shard(source, path, {"w": Kind(VALUES.shape, torch.float32)}, ["w"], progress)
    assert torch.equal(load_file(path)["w"], VALUES)


def test_parts_of_rows_make_a_whole_tensor() -> None:
    assert torch.equal(whole(PIECES).values, VALUES)
