"""Which checkpoints stay. Torch-free."""

import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path

from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.run_dir import Manifest, RunDir, sync
from train_loop.spec import CheckpointSpec

_RETIRED = ".retired"
"""How the name of a checkpoint ends while it is being removed."""


def chosen(manifests: Mapping[int, Manifest], spec: CheckpointSpec, pins: Collection[int]) -> set[int]:
    """The steps whose checkpoints stay: the newest keep_last, the best, and pinned ones.

    Of equally good ones the newer is the best; one that was not measured, or not finite, is none.
    """
    newest = sorted(manifests)[-spec.keep_last :]
    best: list[int] = []
    if spec.keep_best is not None:
        metric, sign = spec.keep_best.metric, 1 if spec.keep_best.mode == "max" else -1
        measured = [(sign * m.metrics[metric], step) for step, m in manifests.items() if metric in m.metrics]
        best = [max(measured)[1]] if measured else []
    return {*newest, *best, *(manifests.keys() & set(pins))}


def retire_others(run_dir: RunDir, spec: CheckpointSpec) -> None:
    """Remove the committed checkpoints that need not stay, and of rejected ones all but the newest.

    One that has lost files takes no other's place; whoever resumes will reject it.
    """
    found = run_dir.manifests()
    manifests = {step: m for step, m in found.items() if has_its_files(run_dir.checkpoint(step), m)}
    for step in sorted(manifests.keys() - chosen(manifests, spec, run_dir.pins())):
        _retire(run_dir, step)
    for folder in sorted(run_dir.checkpoints.glob("step-*.rejected-*"))[:-1]:
        shutil.rmtree(folder, ignore_errors=True)


def _retire(run_dir: RunDir, step: int) -> None:
    """Remove a checkpoint, out of the ledger at one stroke, then its manifest, then the rest.

    Whoever pinned it and has seen its manifest after that keeps it.
    """
    folder = run_dir.checkpoint(step)
    retired = folder.with_name(folder.name + _RETIRED)
    folder.rename(retired)
    sync(folder.parent)
    _remove_unless_pinned(run_dir, retired)


def _remove_unless_pinned(run_dir: RunDir, retired: Path) -> None:
    manifest = retired / NAME
    if step_of(retired) in run_dir.pins() and manifest.exists():
        retired.rename(retired.with_suffix(""))
        sync(retired.parent)
        return
    manifest.unlink(missing_ok=True)
    sync(retired)
    shutil.rmtree(retired, ignore_errors=True)


def put_aside(folder: Path, attempt: int) -> None:
    """Take a checkpoint that was rejected out of the ledger, and keep its files for whoever wants to know why."""
    aside = folder.with_name(f"{folder.name}.rejected-{attempt}")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    sync(folder.parent)


def remove_leftovers(run_dir: RunDir, attempt: int) -> None:
    """Remove what dead processes of this attempt, or of an older one, left half saved or half removed.

    One that is not dead after all cannot commit what it is saving any more: its folder is gone, at one stroke.
    """
    for folder in run_dir.checkpoints.glob("step-*.tmp-*"):
        owner = folder.name.split(".")[1].removeprefix("tmp-")
        if int(owner) <= attempt:
            gone = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    for folder in run_dir.checkpoints.glob(f"step-*{_RETIRED}"):
        _remove_unless_pinned(run_dir, folder)


def without_manifest(run_dir: RunDir) -> list[Path]:
    """Folders named like checkpoints whose manifest is gone, or no manifest of theirs: something has damaged them."""
    known = run_dir.manifests()
    return sorted(path for path in run_dir.checkpoints.glob("step-????????") if step_of(path) not in known)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-").partition(".")[0])
