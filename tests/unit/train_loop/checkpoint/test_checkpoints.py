"""Checkpoints: verification, fenced commits, pins and retention."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.checkpoints import checkpoint, manifest, unfinished
from train_loop.checkpoint.manifest import newest_verified, verify
from train_loop.checkpoint.retention import chosen, retire_others
from train_loop.checkpoint.schedule import SaveSchedule
from train_loop.checkpoint.store.folder import FolderStore
from train_loop.errors import FencedError
from train_loop.run_dir import Fence, RunDir
from train_loop.spec import CheckpointSpec
from train_loop.spec.checkpoint import KeepBestSpec


def test_newest_checkpoint_that_verifies_is_selected(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (10, 20, 30, 40):
        checkpoint(run_dir, step, weights=b"abc", moments=b"def")
    (run_dir.checkpoint(40) / "weights").write_bytes(b"abd")
    (run_dir.checkpoint(30) / "moments").unlink()
    newest, rejected = newest_verified(run_dir)
    assert newest is not None
    assert newest.step == 20
    assert rejected == {
        40: ["weights has another SHA-256 than when it was committed"],
        30: ["moments is missing"],
    }


def test_truncated_file_is_reported_with_its_sizes(tmp_path: Path) -> None:
    folder = checkpoint(RunDir(tmp_path), 10, weights=b"abc")
    (folder / "weights").write_bytes(b"ab")
    assert verify(folder, RunDir(tmp_path).manifests()[10]) == ["weights has 2 bytes, not 3"]


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "not committed", "another step's manifest"])
def test_uncommitted_folder_is_not_a_checkpoint(tmp_path: Path, damage: str) -> None:
    run_dir = RunDir(tmp_path)
    checkpoint(run_dir, 10, weights=b"abc")
    folder = checkpoint(run_dir, 20, weights=b"abc")
    manifest = folder / "manifest.json"
    match damage:
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:-20])
        case "not committed":
            folder.rename(run_dir.checkpoint_in_progress(20, Fence(1)))
        case "another step's manifest":
            manifest.write_bytes((run_dir.checkpoint(10) / "manifest.json").read_bytes())
    newest, _ = newest_verified(run_dir)
    assert newest is not None
    assert newest.step == 10


def names(run_dir: RunDir) -> set[str]:
    return {path.name for path in run_dir.checkpoints.iterdir()}


def test_retention_keeps_the_newest_and_saves_in_flight(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (10, 20, 30):
        checkpoint(run_dir, step, weights=b"abc")
    run_dir.checkpoint_in_progress(40, Fence(1)).mkdir()
    retire_others(run_dir, FolderStore(run_dir, Fence(1)), CheckpointSpec(keep_last=2))
    assert names(run_dir) == {"step-00000020", "step-00000030", "step-00000040.tmp-1.0"}
    FolderStore(run_dir, Fence(1)).clear()
    assert names(run_dir) == {"step-00000020", "step-00000030"}


def test_pinned_checkpoint_stays_until_unpinned(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (10, 20):
        checkpoint(run_dir, step, weights=b"abc")
    assert run_dir.pin(10)
    retire_others(run_dir, FolderStore(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
    assert names(run_dir) == {"step-00000010", "step-00000020"}
    run_dir.unpin(10)
    retire_others(run_dir, FolderStore(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
    assert names(run_dir) == {"step-00000020"}


def test_pin_of_a_missing_checkpoint_raises(tmp_path: Path) -> None:
    assert not RunDir(tmp_path).pin(10)
    assert RunDir(tmp_path).pins() == set()


@pytest.mark.parametrize("pinned", [True, False])
def test_interrupted_removal_is_finished_or_undone_by_a_pin(tmp_path: Path, pinned: bool) -> None:
    run_dir = RunDir(tmp_path)
    folder = checkpoint(run_dir, 10, weights=b"abc")
    if pinned:
        assert run_dir.pin(10)
    folder.rename(folder.with_name(f"{folder.name}.retired"))
    FolderStore(run_dir, Fence(1)).clear()
    assert sorted(run_dir.manifests()) == [10] * pinned
    assert names(run_dir) == ({folder.name} if pinned else set())


def test_pin_does_not_restore_a_partly_removed_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder = checkpoint(run_dir, 10, weights=b"abc")
    assert run_dir.pin(10)
    (folder / "manifest.json").unlink()
    folder.rename(folder.with_name(f"{folder.name}.retired"))
    FolderStore(run_dir, Fence(1)).clear()
    assert names(run_dir) == set()


def test_retrained_step_replaces_a_quarantined_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (checkpoint(run_dir, 10, weights=b"abc") / "manifest.json").write_bytes(b"torn")
    assert FolderStore(run_dir, Fence(1)).clear() == [10]
    FolderStore(run_dir, Fence(1)).put_aside(10)
    checkpoint(run_dir, 10, weights=b"new")
    newest, rejected = newest_verified(run_dir)
    assert newest is not None
    assert (newest.step, rejected) == (10, {})


def test_commit_is_idempotent(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    draft = unfinished(run_dir, 10, weights=b"abc")
    FolderStore(run_dir, Fence(1)).commit(draft)
    FolderStore(run_dir, Fence(1)).commit(draft)
    assert run_dir.manifests() == {10: draft.sealed()}


def test_superseded_attempt_cannot_commit(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    draft = unfinished(run_dir, 10, weights=b"abc")
    run_dir.write_fence(2)
    with pytest.raises(FencedError, match="attempt 2 has taken over from attempt 1"):
        FolderStore(run_dir, Fence(1)).commit(draft)
    assert run_dir.manifests() == {}


@pytest.mark.parametrize("again", [False, True], ids=["as it was", "the newer has saved the same step"])
def test_attempt_superseded_after_its_fence_check_cannot_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    run_dir = RunDir(tmp_path)
    draft = unfinished(run_dir, 10, attempt=1, weights=b"old")

    def lose_the_race(*_: object) -> None:
        monkeypatch.undo()
        run_dir.write_fence(2)
        FolderStore(run_dir, Fence(2)).clear()
        if again:
            newer = unfinished(run_dir, 10, attempt=2, weights=b"new")
            FolderStore(run_dir, Fence(2)).commit(newer)

    monkeypatch.setattr("train_loop.checkpoint.store.folder.check_fence", lose_the_race)
    with pytest.raises(FileNotFoundError, match="have been removed"):
        FolderStore(run_dir, Fence(1)).commit(draft)
    assert [m.attempt for m in run_dir.manifests().values()] == [2] * again
    assert newest_verified(run_dir)[1] == {}


def test_superseded_process_does_not_commit_files_of_its_successor(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    draft = unfinished(run_dir, 10, zombie=b"old")
    FolderStore(run_dir, Fence(1)).clear()
    with pytest.raises(FileNotFoundError):
        FolderStore(run_dir, Fence(1)).commit(draft)
    newer = unfinished(run_dir, 10, successor=b"new")
    with pytest.raises(FileNotFoundError):
        FolderStore(run_dir, Fence(1)).commit(draft)
    FolderStore(run_dir, Fence(1)).commit(newer)
    assert run_dir.manifests() == {10: newer.sealed()}


def test_checkpoint_with_missing_files_replaces_no_other(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (10, 20):
        checkpoint(run_dir, step, weights=b"abc")
    (run_dir.checkpoint(20) / "weights").unlink()
    retire_others(run_dir, FolderStore(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
    assert names(run_dir) == {"step-00000010", "step-00000020"}


metrics = st.fixed_dictionaries({}, optional={"loss": st.floats(allow_nan=False, allow_infinity=False)})
best = st.none() | st.builds(KeepBestSpec, metric=st.just("loss"), mode=st.sampled_from(["min", "max"]))


@given(
    measured=st.dictionaries(st.integers(1, 50), metrics, max_size=12),
    spec=st.builds(CheckpointSpec, keep_last=st.integers(1, 4), keep_best=best),
    pins=st.sets(st.integers(1, 50), max_size=4),
)
def test_steps_to_keep(measured: dict[int, dict[str, float]], spec: CheckpointSpec, pins: set[int]) -> None:
    stays = chosen({step: manifest(step, metrics=values) for step, values in measured.items()}, spec, pins)
    assert stays <= measured.keys()
    assert set(sorted(measured)[-spec.keep_last :]) <= stays, "one of the newest removed"
    assert pins & measured.keys() <= stays, "a pinned checkpoint removed"
    others = stays - pins - set(sorted(measured)[-spec.keep_last :])
    losses = {step: values["loss"] for step, values in measured.items() if "loss" in values}
    if spec.keep_best is None or not losses:
        assert not others
    else:
        choose = min if spec.keep_best.mode == "min" else max
        assert any(losses[step] == choose(losses.values()) for step in stays & losses.keys()), "best removed"
        assert len(others) <= 1


def test_best_checkpoint_is_known_after_a_restart(tmp_path: Path) -> None:
    spec = CheckpointSpec(keep_last=1, keep_best=KeepBestSpec(metric="loss", mode="min"))
    run_dir = RunDir(tmp_path)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 1.5)):
        draft = unfinished(run_dir, step, weights=b"abc")
        FolderStore(run_dir, Fence(1)).commit(draft.model_copy(update={"metrics": {"loss": loss}}))
        # Only storage records which checkpoint was best.
        retire_others(RunDir(tmp_path), FolderStore(RunDir(tmp_path), Fence(1)), spec)
    assert names(run_dir) == {"step-00000020", "step-00000040"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_save_is_due_after_every_steps_and_every_seconds() -> None:
    clock = Clock()
    times = SaveSchedule(CheckpointSpec(every_steps=10, every_seconds=60), step=3, clock=clock)
    assert [step for step in range(1, 31) if times.due(step)] == [10, 20, 30]

    def overdue_at(*moments: float) -> list[float]:
        found = []
        for clock.now in moments:
            if times.overdue:
                found.append(clock.now)
        return found

    assert overdue_at(59, 60) == [60]
    times.begin(14)
    assert times.saved == 14
    assert overdue_at(61, 119, 120) == [120]


def test_no_save_is_due_without_every_steps_and_every_seconds() -> None:
    clock = Clock()
    times = SaveSchedule(CheckpointSpec(every_steps=None), step=0, clock=clock)
    clock.now = 1e9
    assert not times.overdue
    assert not times.due(100)


def test_partly_removed_checkpoint_is_not_listed(tmp_path: Path) -> None:
    """Check that a folder whose removal a kill interrupted has neither a checkpoint's nor a save's name."""
    run_dir = RunDir(tmp_path)
    unfinished(run_dir, 10, weights=b"abc")
    folder = run_dir.checkpoint_in_progress(10, Fence(1))
    folder.rename(folder.with_name(f"{folder.name}.0123abcd"))
    FolderStore(run_dir, Fence(1)).clear()
    assert names(run_dir) == set()
    shutil.rmtree(run_dir.checkpoints)
    FolderStore(run_dir, Fence(1)).clear()
