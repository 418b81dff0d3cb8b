"""A run directory with every file that has a reader."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.support.builders.checkpoints import manifest
from tests.support.builders.specs import infer_spec
from tests.support.builders.tensors import tensor_checkpoint
from train_loop.data.dataset import Dataset
from train_loop.run_dir import (
    ExportStatus,
    ExportWish,
    Fence,
    JsonLines,
    Manifest,
    Outcome,
    Parent,
    RootMarker,
    RunDir,
    Stop,
    write_durably,
    write_run_marker,
)
from train_loop.run_dir.sinks import SinkPlace, write_place
from train_loop.spec import ScalingSpec, parse_any

STEP = 10
WISH = ExportWish(dtype="fp32")
SPEC = parse_any(infer_spec())
DATASET = Dataset(fingerprint="f", parts=(), sequence_length=4)


def sample(root: Path) -> RunDir:
    """Write a run directory with every file that has a reader."""
    run_dir = RunDir(root)
    attempt = run_dir.attempt(1)
    run_dir.write_spec(SPEC)
    write_run_marker(run_dir.root, RootMarker.new())
    for path in (attempt.events, attempt.metrics):
        JsonLines(path, attempt=1).append(event="training_started")
    for path in (attempt.driver_log, attempt.stacks_of(0, 1)):
        write_durably(path, "line\n")
    attempt.write_size(ScalingSpec(num_workers=1))
    attempt.write_outcome(Outcome(result="succeeded"))
    run_dir.write_stop(Stop(mode="pause"))
    tensor_checkpoint(run_dir, STEP, {"model": {"w": torch.arange(4.0)}, "bytes": {"a": "x"}})
    run_dir.raise_fence_to(Fence(1, 1), by="service")
    run_dir.pin(STEP)
    run_dir.write_parent(parent_of(run_dir))
    for pointer in (run_dir.data, run_dir.eval_data):
        write_durably(pointer, DATASET.model_dump_json())
    write_durably(run_dir.code, b"no zip")
    content = io.BytesIO()
    pq.write_table(pa.table({"row": [0]}), content)
    run_dir.results.commit(0, content.getvalue())
    run_dir.exports.write(ExportStatus(step=STEP, wish=WISH, state="running", time=0.0))
    write_durably(lock_of(run_dir), "")
    write_place(run_dir.sink_file("wandb"), SinkPlace())
    return run_dir


def parent_of(run_dir: RunDir) -> Parent:
    return Parent(job="j", run_dir=str(run_dir.root), manifest=manifest(STEP), same_order=True, same_optimizer=True)


def lock_of(run_dir: RunDir) -> Path:
    folder = run_dir.exports.folder(STEP, WISH)
    return folder.with_name(f".{folder.name}.lock")


def manifest_of(run_dir: RunDir) -> Manifest:
    """Return the manifest of the sample's checkpoint, whatever has replaced it."""
    files = {path.name: path for path in run_dir.checkpoint(STEP).iterdir() if path.name != "manifest.json"}
    described = {name: {"size": 1, "sha256": "x"} for name in files}
    return Manifest.model_validate(manifest(STEP).model_dump() | {"files": described})


def events(run_dir: RunDir) -> Path:
    return run_dir.attempt(1).events


def metadata(run_dir: RunDir) -> Path:
    return run_dir.checkpoint(STEP) / ".metadata"


def data_file(run_dir: RunDir) -> Path:
    return run_dir.checkpoint(STEP) / "__0_0.distcp"
