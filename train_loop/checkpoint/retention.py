"""Which checkpoints stay. Torch-free."""

from collections.abc import Collection, Mapping

from train_loop.checkpoint.manifest import has_its_files
from train_loop.checkpoint.store.base import Ledger
from train_loop.run_dir import Manifest, RunDir
from train_loop.spec import CheckpointSpec


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


def retire_others(run_dir: RunDir, ledger: Ledger, spec: CheckpointSpec) -> None:
    """Remove the committed checkpoints that need not stay.

    One that has lost files takes no other's place; whoever resumes will reject it. What was rejected goes now, but for
    the newest, not when it is found: there is something newer again. Raises FencedError.
    """
    # First what an earlier removal has left: it may stand in the way.
    ledger.sweep()
    found = run_dir.manifests()
    manifests = {step: m for step, m in found.items() if has_its_files(run_dir.checkpoint(step), m)}
    for step in sorted(manifests.keys() - chosen(manifests, spec, run_dir.pins())):
        ledger.retire(step)
