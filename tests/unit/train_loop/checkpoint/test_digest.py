"""Digests of a checkpoint's tensors: the bytes that they cover, bounded reads, and missing or damaged checkpoints."""

import hashlib
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.support.builders.checkpoints import checkpoint
from tests.support.builders.tensors import tensor_checkpoint
from train_loop.checkpoint.digest import digest_checkpoint, digest_step, main
from train_loop.checkpoint.export import tensors
from train_loop.checkpoint.export.tensors import CheckpointTensors
from train_loop.errors import CheckpointError
from train_loop.run_dir import RunDir

VALUES: dict[str, Tensor] = {
    "rows": torch.arange(35, dtype=torch.float32).view(7, 5),
    "half": torch.linspace(-1, 1, 6).bfloat16(),
    "step": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "flag": torch.tensor([True, False]),
}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    tensor_checkpoint(run_dir, 10, {"model": VALUES, "lr": 0.1, "rng": {"rank-00000": b"state"}})
    return run_dir


def test_digest_covers_dtype_shape_and_bytes(run_dir: RunDir) -> None:
    found = digest_checkpoint(run_dir.checkpoint(10))
    assert list(found.tensors) == sorted(f"model.{name}" for name in VALUES)
    for name, value in VALUES.items():
        digest = found.tensors[f"model.{name}"]
        dtype = str(value.dtype).removeprefix("torch.")
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        head = f"{dtype} {list(value.shape)}\n".encode()
        assert digest == (dtype, list(value.shape), hashlib.sha256(head + content).hexdigest()), name
    lines = "".join(f"{name} {digest.sha256}\n" for name, digest in found.tensors.items())
    assert found.sha256 == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize(
    "changed", [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2, dtype=torch.int32), -torch.zeros(3, 2)]
)
def test_digest_of_another_shape_dtype_or_bit_differs(tmp_path: Path, changed: Tensor) -> None:
    one = digest_checkpoint(tensor_checkpoint(RunDir(tmp_path), 1, {"a": torch.zeros(3, 2), "b": torch.ones(2)}))
    other = digest_checkpoint(tensor_checkpoint(RunDir(tmp_path), 2, {"a": changed, "b": torch.ones(2)}))
    assert one.tensors["b"] == other.tensors["b"]
    assert one.tensors["a"].sha256 != other.tensors["a"].sha256
    assert one.sha256 != other.sha256


def test_digest_reads_pieces_of_bounded_size(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_dir.checkpoint(10)
    whole = digest_checkpoint(folder)
    monkeypatch.setattr(tensors, "_PIECE_BYTES", 48)
    assert [len(part) for part in CheckpointTensors(folder).row_major_bytes("model.rows")] == [48, 48, 44]
    assert digest_checkpoint(folder) == whole


def test_digest_does_not_depend_on_the_format_of_the_file(run_dir: RunDir) -> None:
    other = tensor_checkpoint(run_dir, 20, {"model": VALUES}, crc=True)
    assert digest_checkpoint(other) == digest_checkpoint(run_dir.checkpoint(10))


def chunked(folder: Path, *chunks: tuple[list[int], list[int]]) -> Path:
    """Rewrite the metadata of `model.rows`: its chunks have these offsets and sizes."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    described = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    rows = metadata.state_dict_metadata["model.rows"]
    metadata.state_dict_metadata["model.rows"] = replace(rows, chunks=described)
    file.write_bytes(pickle.dumps(metadata))
    return folder


def test_replicas_and_empty_chunks_do_not_change_the_digest(run_dir: RunDir) -> None:
    folder = run_dir.checkpoint(10)
    whole = digest_checkpoint(folder)
    assert digest_checkpoint(chunked(folder, ([7, 0], [0, 5]), ([0, 0], [7, 5]), ([0, 0], [7, 5]))) == whole


@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        ([([0, 3], [7, 2]), ([0, 0], [7, 4])], r"model.rows of shape \[7, 5\] has chunks that do not cover it once"),
        ([([0, 0], [7, 5]), ([5, 0], [2, 5])], r"a chunk of shape \[2, 5\] at \[5, 0\]; only chunks of consecutive"),
        ([([0, 0], [0, 5])], r"model.rows of shape \[7, 5\] has chunks for 0 rows only"),
    ],
    ids=["overlap of columns", "overlap", "missing"],
)
def test_chunks_that_are_not_consecutive_rows_are_an_error(
    run_dir: RunDir, chunks: list[tuple[list[int], list[int]]], fault: str
) -> None:
    with pytest.raises(CheckpointError, match=fault):
        digest_checkpoint(chunked(run_dir.checkpoint(10), *chunks))


def test_step_without_checkpoint_has_no_digests(run_dir: RunDir) -> None:
    assert digest_step(run_dir, 11) is None


def test_damaged_checkpoint_has_faults_and_no_digests(run_dir: RunDir) -> None:
    folder = checkpoint(run_dir, 20, weights=b"abc")
    (folder / "weights").write_bytes(b"abd")
    faults = ["weights has another SHA-256 than when it was committed"]
    assert digest_step(run_dir, 20) == (faults, "", {})


def test_checkpoint_that_retention_removes_has_no_digests(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [run_dir.manifests(), dict[int, object]()]
    (run_dir.checkpoint(10) / ".metadata").unlink()
    monkeypatch.setattr(RunDir, "manifests", lambda _: found.pop(0))
    assert digest_step(run_dir, 10) is None


@pytest.mark.slow
def test_module_prints_json(run_dir: RunDir) -> None:
    command = [sys.executable, "-m", "train_loop.checkpoint.digest", str(run_dir.root), "--step"]
    printed = json.loads(subprocess.run([*command, "10"], capture_output=True, text=True, check=True).stdout)
    found = digest_step(run_dir, 10)
    assert found is not None
    assert printed == {
        "faults": [],
        "sha256": found.sha256,
        "tensors": {name: one._asdict() for name, one in found.tensors.items()},
    }


def test_step_without_a_checkpoint_prints_null(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["digest", str(run_dir.root), "--step", "11"])
    main()
    assert capsys.readouterr().out == "null\n"
