"""Checkpoint store guarantees on both kinds of storage: with and without renamable folders."""

import errno
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.builders.checkpoints import checkpoint, edit, unfinished
from train_loop.checkpoint.manifest import newest_verified, verify
from train_loop.checkpoint.retention import retire_others
from train_loop.checkpoint.store import folder as folder_store
from train_loop.checkpoint.store import objects as object_store
from train_loop.checkpoint.store.open import open_store
from train_loop.errors import FencedError
from train_loop.liveness.fencing import check_fence
from train_loop.run_dir import ExportStatus, ExportWish, Fence, RunDir, UnknownFormatError, create_object
from train_loop.spec import CheckpointSpec

MODULES = (folder_store, object_store)


@pytest.fixture(params=["folders", "objects"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    if request.param == "folders":
        return RunDir(tmp_path)
    MemoryFileSystem.store.clear()
    return RunDir.at("memory://runs/default/job")


def steps(run_dir: RunDir) -> list[int]:
    """Return the steps of all checkpoints, each of which must verify."""
    for step, manifest in run_dir.manifests().items():
        assert verify(run_dir.checkpoint(step), manifest) == []
    return sorted(run_dir.manifests())


def there(run_dir: RunDir, step: int) -> bool:
    """Return True if any file of a step is left."""
    return any(run_dir.checkpoints.glob(f"step-{step:08d}*/*"))


def test_commit_is_idempotent(run_dir: RunDir) -> None:
    draft = unfinished(run_dir, 10, weights=b"abc")
    for _ in range(2):
        assert open_store(run_dir, Fence(1)).commit(draft) == draft.sealed()
    assert run_dir.manifests() == {10: draft.sealed()}


def test_superseded_attempt_neither_commits_nor_removes(run_dir: RunDir) -> None:
    checkpoint(run_dir, 10, weights=b"abc")
    draft = unfinished(run_dir, 20, weights=b"abc")
    run_dir.write_fence(2)
    with pytest.raises(FencedError, match="attempt 2 has taken over from attempt 1"):
        open_store(run_dir, Fence(1)).commit(draft)
    with pytest.raises(FencedError, match="attempt 2 has taken over from attempt 1"):
        open_store(run_dir, Fence(1)).retire(10)
    assert steps(run_dir) == [10]


def test_fence_is_never_lowered_and_never_guessed(run_dir: RunDir) -> None:
    run_dir.write_fence(2)
    run_dir.write_fence(1)
    assert run_dir.fence() == Fence(2)
    (run_dir.root / "control" / "fence.json").write_bytes(b"{torn")
    with pytest.raises(ValueError, match="Invalid JSON"):
        run_dir.fence()
    run_dir.write_fence(3)
    assert run_dir.fence() == Fence(3)


def hold_up(monkeypatch: pytest.MonkeyPatch, *, at_check: int, meanwhile: Any) -> None:
    """Run an action when an attempt checks the fence for the n-th time."""
    checks = iter(range(1, 100))

    def check_then_lose_the_race(run_dir: RunDir, token: Fence) -> None:
        if next(checks) == at_check:
            monkeypatch.undo()
            if at_check == 1:
                check_fence(run_dir, token)
                meanwhile()
                return
            meanwhile()
        check_fence(run_dir, token)

    for module in MODULES:
        monkeypatch.setattr(module, "check_fence", check_then_lose_the_race)


@pytest.mark.parametrize("again", [False, True], ids=["as it was", "the newer has saved the same step"])
def test_attempt_superseded_after_its_fence_check_replaces_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    draft = unfinished(run_dir, 10, old=b"old")

    def take_over() -> None:
        run_dir.write_fence(2)
        open_store(run_dir, Fence(2)).clear()
        if again:
            checkpoint(run_dir, 10, attempt=2, new=b"new")

    hold_up(monkeypatch, at_check=1, meanwhile=take_over)
    with pytest.raises((FileNotFoundError, FencedError)):
        open_store(run_dir, Fence(1)).commit(draft)
    assert [m.attempt for m in run_dir.manifests().values()] == [2] * again
    assert steps(run_dir) == [10] * again


def test_superseded_commit_between_manifest_and_second_check_keeps_the_successors_manifest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On object storage, the newer attempt replaces the manifest before the older one checks the fence again."""
    MemoryFileSystem.store.clear()
    run_dir = RunDir.at("memory://runs/default/job")
    draft = unfinished(run_dir, 10, old=b"old")

    def take_over() -> None:
        run_dir.write_fence(2)
        checkpoint(run_dir, 10, attempt=2, new=b"new")

    hold_up(monkeypatch, at_check=2, meanwhile=take_over)
    with pytest.raises(FencedError):
        open_store(run_dir, Fence(1)).commit(draft)
    assert [m.attempt for m in run_dir.manifests().values()] == [2]
    assert steps(run_dir) == [10]


def test_quarantined_checkpoint_stays_until_a_newer_one_exists(run_dir: RunDir) -> None:
    ledger = open_store(run_dir, Fence(1))
    for step in (10, 20, 30, 40):
        checkpoint(run_dir, step, weights=b"abc")
    assert run_dir.pin(10)
    for step in (40, 30, 10):
        ledger.put_aside(step)
        # The answer to the first call was lost.
        ledger.put_aside(step)
    assert steps(run_dir) == [20]
    ledger.clear()
    assert all(there(run_dir, step) for step in (10, 20, 30, 40)), "a resume removed a checkpoint"
    checkpoint(run_dir, 50, weights=b"abc")
    retire_others(run_dir, ledger, CheckpointSpec(keep_last=2))
    assert steps(run_dir) == [20, 50]
    assert [step for step in (10, 30, 40) if there(run_dir, step)] == [10, 40], "the pinned and the newest stay"


def test_quarantined_step_can_be_retrained_and_quarantined_again(run_dir: RunDir) -> None:
    ledger = open_store(run_dir, Fence(1))
    for weights in (b"first", b"second", b"third"):
        checkpoint(run_dir, 10, weights=weights)
        assert steps(run_dir) == [10]
        ledger.put_aside(10)
        assert (steps(run_dir), ledger.clear()) == ([], [])


def test_interrupted_removal_is_finished_after_the_next_save(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_store(run_dir, Fence(1))
    for step in (10, 20, 30):
        checkpoint(run_dir, step, weights=b"abc")

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(type(ledger), "_remove_unless_pinned", fail)
        with pytest.raises(OSError, match="Stale"):
            retire_others(run_dir, ledger, CheckpointSpec(keep_last=2))
    assert there(run_dir, 10)
    # The step was trained again and is removed again.
    checkpoint(run_dir, 10, weights=b"def")
    checkpoint(run_dir, 40, weights=b"abc")
    retire_others(run_dir, ledger, CheckpointSpec(keep_last=2))
    assert [step for step in (10, 20, 30, 40) if there(run_dir, step)] == [30, 40]


def test_commit_with_a_lost_answer_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry on object storage finds the name taken by its own manifest."""
    MemoryFileSystem.store.clear()
    run_dir = RunDir.at("memory://runs/default/job")
    draft = unfinished(run_dir, 10, weights=b"abc")

    def create_twice(path: Path, content: bytes) -> None:
        create_object(path, content)
        create_object(path, content)

    monkeypatch.setattr(object_store, "create_object", create_twice)
    assert open_store(run_dir, Fence(1)).commit(draft) == draft.sealed()
    # Every repeated commit checks the fence again.
    run_dir.write_fence(2)
    with pytest.raises(FencedError):
        open_store(run_dir, Fence(1)).commit(draft)
    assert steps(run_dir) == [10], "a commit made before the newer attempt's selection was removed"


def test_quarantined_checkpoint_survives_a_failed_save_of_its_step() -> None:
    MemoryFileSystem.store.clear()
    run_dir = RunDir.at("memory://runs/default/job")
    checkpoint(run_dir, 10, weights=b"abc")
    open_store(run_dir, Fence(1)).put_aside(10)
    unfinished(run_dir, 10, more=b"def")
    open_store(run_dir, Fence(1)).discard(10)
    assert (run_dir.checkpoint(10) / "weights").read_bytes() == b"abc"


def test_pin_during_a_removal_keeps_the_checkpoint(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next cleanup restores the checkpoint even if the removing attempt dies at once."""
    checkpoint(run_dir, 10, weights=b"abc")
    ledger = open_store(run_dir, Fence(1))

    def pin_and_die(*_: object) -> None:
        run_dir.pin(10)
        # The pin was written after the removal had seen the manifest.
        (run_dir.root / "control" / "pins" / "00000010.user").write_bytes(b"")
        raise KeyboardInterrupt

    monkeypatch.setattr(type(ledger), "_remove_unless_pinned", pin_and_die)
    with pytest.raises(KeyboardInterrupt):
        ledger.retire(10)
    assert steps(run_dir) == []
    monkeypatch.undo()
    assert ledger.clear() == []
    assert steps(run_dir) == [10]


def test_export_pin_lasts_while_the_export_runs(run_dir: RunDir) -> None:
    checkpoint(run_dir, 10, weights=b"abc")
    wish = ExportWish(dtype="bf16", weights="ema")
    run_dir.pin(10, by=wish.pinned_by)
    assert run_dir.pins() == set()
    status = ExportStatus(step=10, wish=wish, state="running", time=2e9)
    run_dir.exports.write(status)
    assert run_dir.pins() == {10}
    run_dir.exports.write(status.model_copy(update={"time": 1e9}))
    assert run_dir.pins() == set()
    # A silence of one minute may mean failing storage or a different clock.
    run_dir.exports.write(status.model_copy(update={"time": time.time() - 120}))
    assert run_dir.pins() == {10}


def test_foreign_names_among_checkpoints_are_kept(run_dir: RunDir) -> None:
    checkpoint(run_dir, 10, weights=b"abc")
    for name in ("step-backup12", "step-00000010.tmp-old", "step-0000001x", "notes"):
        (run_dir.checkpoints / name).mkdir(parents=True, exist_ok=True)
        (run_dir.checkpoints / name / "file").write_bytes(b"abc")
    assert open_store(run_dir, Fence(1)).clear() == []
    retire_others(run_dir, open_store(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
    assert steps(run_dir) == [10]
    assert (run_dir.checkpoints / "step-backup12" / "file").read_bytes() == b"abc"


def test_storage_errors_are_not_taken_for_empty_storage(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be listed, or a file that cannot be read, does not mean a missing checkpoint."""
    checkpoint(run_dir, 10, weights=b"abc")
    manifest, folder = run_dir.manifests()[10], run_dir.checkpoint(10)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", fail)
        patch.setattr("os.open", fail)
        patch.setattr(MemoryFileSystem, "ls", fail)
        for call in (run_dir.manifests, run_dir.pins, run_dir.attempts, open_store(run_dir, Fence(1)).clear):
            with pytest.raises(OSError, match="Stale"):
                call()
    with monkeypatch.context() as patch:
        patch.setattr("os.stat", fail)
        patch.setattr(MemoryFileSystem, "info", fail)
        with pytest.raises(OSError, match="Stale"):
            verify(folder, manifest)
    assert newest_verified(run_dir) == (manifest, {})


def test_checkpoints_of_other_versions_verify(run_dir: RunDir) -> None:
    checkpoint(run_dir, 10, weights=b"abc")
    edit(run_dir, 10, invented_later={"by": "others"})
    assert steps(run_dir) == [10]
    assert open_store(run_dir, Fence(1)).clear() == []


def test_unknown_format_is_reported_and_not_quarantined(run_dir: RunDir) -> None:
    checkpoint(run_dir, 10, weights=b"abc")
    edit(run_dir, 10, format=2)
    with pytest.raises(
        UnknownFormatError, match="step 10 has format 2, but this version of Trainshed reads format 1; update to"
    ):
        open_store(run_dir, Fence(1)).clear()
    assert there(run_dir, 10)


def test_last_two_formats_are_read_and_others_refused_by_name(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(run_dir, 10, weights=b"abc")
    written = run_dir.manifests()
    for now, message in (
        (2, None),
        (3, "has format 1, but this version of Trainshed reads formats 2 to 3; use the ver"),
    ):
        monkeypatch.setattr("train_loop.run_dir.formats.FORMAT", now)
        if message is None:
            assert run_dir.manifests() == written
            continue
        with pytest.raises(UnknownFormatError, match=message):
            run_dir.manifests()
    monkeypatch.undo()
    for number in (0, True, "1", None):
        edit(run_dir, 10, format=number)
        with pytest.raises(UnknownFormatError, match=f"step 10 has format {number}, but this version"):
            run_dir.manifests()
