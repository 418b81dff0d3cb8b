"""Small committed checkpoints, for tests that do not read their content."""

import hashlib
import json
from pathlib import Path

from train_loop.checkpoint.manifest import describe_file
from train_loop.checkpoint.store.open import open_store
from train_loop.run_dir import DataPosition, Fence, Manifest, RunDir, read_whole


def manifest(step: int, *, attempt: int = 1, epoch: int = 0, metrics: dict[str, float] | None = None) -> Manifest:
    """Return a manifest without files."""
    return Manifest(
        step=step,
        tokens=step,
        position=DataPosition(),
        attempt=attempt,
        epoch=epoch,
        time=0.0,
        fingerprint="f",
        dataset="d",
        world=1,
        mesh={"fsdp": 1},
        versions={},
        metrics=metrics or {},
        files={},
    )


def unfinished(run_dir: RunDir, step: int, *, attempt: int = 1, epoch: int = 0, **files: bytes) -> Manifest:
    """Write the files of a save without the manifest that would commit it."""
    folder = open_store(run_dir, Fence(attempt, epoch)).workplace(step)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    described = {name: describe_file(folder / name) for name in files}
    return manifest(step, attempt=attempt, epoch=epoch).model_copy(update={"files": described})


def checkpoint(run_dir: RunDir, step: int, *, attempt: int = 1, epoch: int = 0, **files: bytes) -> Path:
    """Write a committed checkpoint of the given files."""
    draft = unfinished(run_dir, step, attempt=attempt, epoch=epoch, **files)
    open_store(run_dir, Fence(attempt, epoch)).commit(draft)
    return run_dir.checkpoint(step)


def edit(run_dir: RunDir, step: int, **fields: object) -> None:
    """Write a manifest as another version would: with unknown fields, sealed by the same rule."""
    path = run_dir.checkpoint(step) / "manifest.json"
    written = json.loads(read_whole(path)) | fields
    rest = {name: value for name, value in written.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()
    path.write_bytes(json.dumps(rest | {"digest": digest}, indent=4).encode())
