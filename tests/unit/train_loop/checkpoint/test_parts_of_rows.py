"""Checkpoints of ranks that hold parts of rows: exports and whole tensors have each part at its place."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.builders.tensors import tensor_checkpoint
from train_loop.checkpoint.export import tensors
from train_loop.checkpoint.export.huggingface import _write_shard
from train_loop.checkpoint.export.safetensors import Kind
from train_loop.checkpoint.export.tensors import CheckpointTensors, whole
from train_loop.model.families.family import Unchanged
from train_loop.run_dir import RunDir

VALUES = torch.arange(30, dtype=torch.float32).view(5, 6)
PLACES = ((0, 0, 3, 4), (3, 0, 5, 4), (0, 4, 3, 6), (3, 4, 5, 6))
"""First rows and columns of four parts, and those after their last."""


@pytest.fixture(params=[1, 2**20], ids=["one row at once", "all rows at once"])
def saved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointTensors:
    monkeypatch.setattr(tensors, "_PIECE_BYTES", request.param)
    parts = {str(number): VALUES[top:end, left:right].clone() for number, (top, left, end, right) in enumerate(PLACES)}
    folder = tensor_checkpoint(RunDir(tmp_path), 10, {"model": parts})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunks = [
        ChunkStorageMetadata(torch.Size([top, left]), torch.Size([end - top, right - left]))
        for top, left, end, right in PLACES
    ]
    for number, chunk in enumerate(chunks):
        stored = metadata.storage_data[MetadataIndex(f"model.{number}", torch.Size([0, 0]))]
        metadata.storage_data[MetadataIndex("model.w", chunk.offsets)] = stored
    # The last part has a replica.
    metadata.state_dict_metadata["model.w"] = TensorStorageMetadata(
        TensorProperties(torch.float32), VALUES.shape, [*chunks, chunks[-1]]
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return CheckpointTensors(folder)


def test_parts_of_rows_are_exported_at_their_place(saved: CheckpointTensors, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    source: Any = SimpleNamespace(saved=saved, parts={"w": Unchanged("w", (5, 6))}, names={"w": "model.w"})
    progress: Any = SimpleNamespace(counted=lambda pieces: pieces)
    _write_shard(source, path, {"w": Kind(VALUES.shape, torch.float32)}, ["w"], progress)
    assert torch.equal(load_file(path)["w"], VALUES)


def test_parts_of_rows_make_a_whole_tensor(saved: CheckpointTensors) -> None:
    assert torch.equal(whole(saved.pieces("model.w")).values, VALUES)
    assert b"".join(saved.row_major_bytes("model.w")) == VALUES.numpy().tobytes()
