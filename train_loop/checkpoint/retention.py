"""Retention: selection of the checkpoints to keep. Torch-free."""

from collections.abc import Collection, Mapping

from train_loop.checkpoint.manifest import has_its_files
from train_loop.checkpoint.store.base import CheckpointStore
from train_loop.run_dir import Manifest, RunDir
from train_loop.spec import CheckpointSpec


def chosen(manifests: Mapping[int, Manifest], spec: CheckpointSpec, pins: Collection[int]) -> set[int]:
    """Return the steps of the checkpoints to keep: the newest keep_last, the best, and pinned ones.

    Of equally good checkpoints, the newer is the best. A checkpoint without a finite value of the metric is never the
    best.
    """
    newest = sorted(manifests)[-spec.keep_last :]
    best: list[int] = []
    if spec.keep_best is not None:
        metric, sign = spec.keep_best.metric, 1 if spec.keep_best.mode == "max" else -1
        measured = [(sign * m.metrics[metric], step) for step, m in manifests.items() if metric in m.metrics]
        best = [max(measured)[1]] if measured else []
    return {*newest, *best, *(manifests.keys() & set(pins))}


def retire_others(run_dir: RunDir, ledger: CheckpointStore, spec: CheckpointSpec) -> None:
    """Remove the committed checkpoints that retention does not keep. Raises FencedError.

    A checkpoint with missing files does not count as kept; a resume will reject it. Rejected checkpoints, except the
    newest, are removed here and not when they are found: only now is there a newer checkpoint.
    """
    # First finish earlier removals: their remains may be in the way.
    ledger.sweep()
    found = run_dir.manifests()
    manifests = {step: m for step, m in found.items() if has_its_files(run_dir.checkpoint(step), m)}
    for step in sorted(manifests.keys() - chosen(manifests, spec, run_dir.pins())):
        ledger.retire(step)
