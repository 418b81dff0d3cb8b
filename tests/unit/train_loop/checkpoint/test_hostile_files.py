"""Checkpoints whose files were written to lead a reader out of the folder, or to run code: they are refused by name."""

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from tests.support.builders.checkpoints import edit
from tests.support.builders.tensors import tensor_checkpoint
from train_loop.checkpoint.digest import digest_checkpoint, digest_step
from train_loop.checkpoint.export.tensors import CheckpointTensors, saved_shapes
from train_loop.checkpoint.files.metadata import parse_generators
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.errors import CheckpointError
from train_loop.run_dir import RunDir
from train_loop.state import rng_state

STEP = 10


class Call(NamedTuple):
    """An object whose unpickling calls a function."""

    function: Callable[..., object]
    arguments: tuple[object, ...]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


def evil(tmp_path: Path) -> Call:
    return Call(os.mkdir, (str(tmp_path / "ran"),))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "alpha" / "run")
    tensor_checkpoint(run_dir, STEP, {"model": {"w": torch.arange(4.0)}})
    return run_dir


def read(run_dir: RunDir, values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # DCP warns of loads in a single process.
        warnings.simplefilter("ignore")
        load(values, storage_reader=CheckpointReader(run_dir.checkpoint(STEP)), no_dist=True)


READERS: dict[str, Callable[[RunDir], object]] = {
    "digest": lambda run: digest_checkpoint(run.checkpoint(STEP)),
    "export": lambda run: CheckpointTensors(run.checkpoint(STEP)),
    "shapes": lambda run: saved_shapes(run.checkpoint(STEP)),
    "resume": lambda run: CheckpointReader(run.checkpoint(STEP)).read_metadata(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("place", ["../other", "../../../../beta/run/checkpoints/step-00000010/__0_0.distcp", "/etc/x"])
def test_metadata_that_name_files_elsewhere_are_refused(run_dir: RunDir, reader: str, place: str) -> None:
    file = run_dir.checkpoint(STEP) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for one in metadata.storage_data.values():
        one.relative_path = place
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"names the file '{place}' outside its folder; copy the checkpoint"):
        READERS[reader](run_dir)


@pytest.mark.parametrize("place", ["../../spec.json", "/etc/passwd", "link"])
def test_manifest_that_names_files_elsewhere_has_faults(run_dir: RunDir, tmp_path: Path, place: str) -> None:
    (run_dir.root / "spec.json").write_text("{}")
    (run_dir.checkpoint(STEP) / "link").symlink_to("/etc/passwd")
    found = run_dir.manifests()[STEP].model_dump()["files"]
    edit(run_dir, STEP, files=found | {place: {"size": 2, "sha256": "x"}})
    digests = digest_step(run_dir, STEP)
    assert digests is not None
    (fault,) = digests.faults
    assert "only regular files and folders of a run directory are used" in fault


@pytest.mark.parametrize("reader", READERS)
def test_code_in_metadata_does_not_run(run_dir: RunDir, tmp_path: Path, reader: str) -> None:
    (run_dir.checkpoint(STEP) / ".metadata").write_bytes(pickle.dumps(evil(tmp_path)))
    with pytest.raises(CheckpointError, match=r"it names \w+\.mkdir, which is not part of a checkpoint's metadata"):
        READERS[reader](run_dir)
    assert not (tmp_path / "ran").exists()


def test_code_in_a_value_does_not_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    tensor_checkpoint(run_dir, STEP, {"scheduler": {"0": evil(tmp_path)}})
    with pytest.raises(CheckpointException, match="has an entry that is not plain data"):
        read(run_dir, {"scheduler": {"0": 0}})
    assert not (tmp_path / "ran").exists()


def test_generators_are_read_without_other_classes(tmp_path: Path) -> None:
    now = rng_state()
    found = parse_generators(pickle.dumps(now))
    assert torch.equal(found["torch"], now["torch"])
    assert (found["python"], repr(found["numpy"])) == (now["python"], repr(now["numpy"]))
    for content in (
        evil(tmp_path),
        {"torch": evil(tmp_path)},
        Call(torch.storage._load_from_bytes, (torch_evil(tmp_path),)),
    ):
        with pytest.raises(CheckpointError, match="the checkpoint's random generators cannot be read: "):
            parse_generators(pickle.dumps(content))
    assert not (tmp_path / "ran").exists()


def torch_evil(tmp_path: Path) -> bytes:
    """Return an object of `torch.save` with code, which torch's storages contain."""
    torch.save(evil(tmp_path), tmp_path / "x.pt")
    return (tmp_path / "x.pt").read_bytes()
