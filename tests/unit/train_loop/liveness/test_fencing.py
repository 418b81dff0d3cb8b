"""Fencing tokens: raising the fence, and the limits of a superseded group."""

import fcntl
import json
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.builders.checkpoints import checkpoint
from tests.support.waiting import wait_for
from train_loop.checkpoint.store.open import open_store
from train_loop.data.stream.local import local_stream
from train_loop.errors import FencedError
from train_loop.faults.watchdog import watched
from train_loop.liveness import heartbeat
from train_loop.liveness.fencing import (
    FENCED_EXIT_CODE,
    NewestEpoch,
    begin_group,
    check_fence,
    fence_watched,
    next_epoch,
    raise_fence,
)
from train_loop.loop.metrics import replayed_steps
from train_loop.loop.session import Session
from train_loop.run_dir import (
    NO_FENCE,
    Fence,
    JsonLines,
    RootMarker,
    RunDir,
    expect_run_dir,
    lines,
    read_lines,
    write_durably,
    write_run_marker,
)
from train_loop.telemetry.event_log import EventLog, group_journal, last_word


@pytest.fixture(params=["folders", "objects"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    if request.param == "folders":
        return RunDir(tmp_path / "run")
    MemoryFileSystem.store.clear()
    return RunDir.at("memory://runs/default/job")


def test_groups_of_an_attempt_get_increasing_epochs(run_dir: RunDir) -> None:
    run_dir.write_fence(1)
    assert [begin_group(run_dir, 1, by=name) for name in "abc"] == [Fence(1, 1), Fence(1, 2), Fence(1, 3)]
    assert json.loads((run_dir.root / "control" / "fence.json").read_bytes()) == {"attempt": 1, "epoch": 3}
    run_dir.write_fence(2)
    assert (run_dir.fence(), next_epoch(run_dir, 2)) == (Fence(2), 1)
    with pytest.raises(FencedError, match="attempt 2 has taken over from attempt 1"):
        begin_group(run_dir, 1, by="d")


def test_repeated_start_keeps_the_epoch(run_dir: RunDir) -> None:
    assert begin_group(run_dir, 1, by="a") == begin_group(run_dir, 1, by="a") == Fence(1, 1)
    raise_fence(run_dir, Fence(1, 1), by="a")


def test_epoch_taken_by_another_driver_is_rejected(run_dir: RunDir) -> None:
    """Both drivers computed the same epoch before either raised the fence."""
    raise_fence(run_dir, Fence(1, 1), by="a")
    with pytest.raises(FencedError):
        raise_fence(run_dir, Fence(1, 1), by="b")


def test_late_write_of_fence_json_does_not_lower_the_fence(run_dir: RunDir) -> None:
    begin_group(run_dir, 1, by="a")
    begin_group(run_dir, 1, by="b")
    write_durably(run_dir.root / "control" / "fence.json", '{"attempt": 1, "epoch": 1}')
    assert run_dir.fence() == Fence(1, 2)


def test_fence_json_written_by_hand_is_honoured(run_dir: RunDir) -> None:
    token = begin_group(run_dir, 1, by="a")
    write_durably(run_dir.root / "control" / "fence.json", '{"attempt": 1, "epoch": 7, "by": "an operator"}')
    with pytest.raises(FencedError, match="worker group 7 of attempt 1 has taken over from group 1"):
        check_fence(run_dir, token)
    assert begin_group(run_dir, 1, by="b") == Fence(1, 8)


def test_fence_of_an_older_version_is_read(run_dir: RunDir) -> None:
    assert run_dir.fence() == NO_FENCE
    write_durably(run_dir.root / "control" / "fence.json", '{"attempt": 3}')
    assert run_dir.fence() == Fence(3)


def test_damaged_fence_json_is_a_storage_error_to_writers(run_dir: RunDir) -> None:
    token = begin_group(run_dir, 1, by="a")
    write_durably(run_dir.root / "control" / "fence.json", "{torn")
    with pytest.raises(OSError, match=r"fence\.json is damaged"):
        check_fence(run_dir, token)


def test_old_entries_are_pruned_and_their_epochs_stay_taken(run_dir: RunDir) -> None:
    for number in range(40):
        begin_group(run_dir, 1, by=str(number))
    assert len(list((run_dir.root / "control" / "fence").iterdir())) <= 17
    assert not run_dir.raise_fence_to(Fence(1, 2), by="late")
    assert run_dir.fence() == Fence(1, 40)


def test_newest_epoch_is_kept_if_the_fence_is_unreadable(run_dir: RunDir) -> None:
    newest = NewestEpoch(run_dir, 1)
    assert newest() == 0
    begin_group(run_dir, 1, by="a")
    assert newest() == 1
    write_durably(run_dir.root / "control" / "fence.json", "{torn")
    assert newest() == 1


def test_superseded_group_writes_no_line(run_dir: RunDir) -> None:
    token = begin_group(run_dir, 1, by="a")
    journal = group_journal(run_dir, token)
    journal.metrics(step=1)
    journal.flush()
    begin_group(run_dir, 1, by="b")
    with pytest.raises(FencedError):
        journal.event("training_ended", result="succeeded")
    with suppress(FencedError):
        # On object storage, append does not check the fence; flush does.
        journal.metrics(step=2)
    with suppress(FencedError):
        journal.flush()
    assert [line["step"] for line in read_lines(run_dir.attempt(1).metrics)] == [1]
    assert last_word(run_dir.attempt(1)) is None


def test_readers_drop_late_lines_of_a_superseded_group(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for epoch, step in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 9)):
        EventLog(run_dir.attempt(1), epoch=partial(int, epoch)).metrics(step=step)
    counted = [(line["epoch"], line["step"]) for line in read_lines(run_dir.attempt(1).metrics)]
    assert counted == [(1, 1), (2, 1), (2, 2)]
    assert len(list(lines.read_all_lines(run_dir.attempt(1).metrics))) == 5
    assert replayed_steps(run_dir, 1) == 1


def test_append_does_not_wait_for_a_paused_lock_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_LOCK_SECONDS", 0.1)
    path = tmp_path / "events.jsonl"
    JsonLines(path, attempt=1).append(event="a")
    with path.open("a+b") as frozen:
        fcntl.flock(frozen, fcntl.LOCK_EX)
        started = time.monotonic()
        JsonLines(path, attempt=1).append(event="b")
        assert time.monotonic() - started < 2
    assert [line["event"] for line in read_lines(path)] == ["a", "b"]


BLOCKED = """
import sys, threading, time
from train_loop.liveness.fencing import begin_group, fence_watched
from train_loop.run_dir import RunDir
run_dir = RunDir(__import__("pathlib").Path(sys.argv[1]))
with fence_watched(run_dir, begin_group(run_dir, 1, by="a")):
    print("blocked", flush=True)
    threading.Event().wait()
"""


def test_heartbeat_reports_the_start_of_a_storage_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, marks = RunDir(tmp_path / "run"), list[float | None]()
    write_run_marker(run_dir.root, RootMarker.new())
    expect_run_dir(run_dir.root)
    monkeypatch.setattr(heartbeat, "mark_storage", lambda since, errno=0: marks.append(since))
    with fence_watched(run_dir, begin_group(run_dir, 1, by="a"), poll_seconds=0.02):
        wait_for(lambda: marks[-1:] == [None])
        run_dir.root.rename(tmp_path / "away")
        since = wait_for(lambda: marks[-1] if marks[-1] and time.monotonic() - marks[-1] > 0.5 else None)
        (tmp_path / "away").rename(run_dir.root)
        wait_for(lambda: marks[-1] is None)
    assert time.monotonic() - 60 < since < time.monotonic()


def test_superseded_rank_that_is_blocked_exits_within_5_seconds(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"blocked\n"
    before = sorted(tmp_path.rglob("*"))
    begin_group(RunDir(tmp_path), 1, by="b")
    _, errors = process.communicate(timeout=5)
    assert process.returncode == FENCED_EXIT_CODE
    assert b"worker group 2 of attempt 1 has taken over from group 1" in errors
    assert len(sorted(tmp_path.rglob("*"))) == len(before) + 1, "expected only the new entry"


def a_session(root: Path, *, epoch: int = 0) -> Session:
    return Session(
        rank=0,
        world=1,
        local_rank=0,
        attempt=1,
        epoch=epoch,
        run_dir=RunDir(root),
        open_stream=local_stream,
        timeout=timedelta(minutes=1),
    )


def test_superseded_group_keeps_the_stacks_of_its_successor(tmp_path: Path) -> None:
    stacks = RunDir(tmp_path).attempt(1).stacks
    with watched(a_session(tmp_path, epoch=1)):
        RunDir(tmp_path).raise_fence_to(Fence(1, 2), by="b")
        with watched(a_session(tmp_path, epoch=2)):
            (stacks / "rank-00000.group-2.txt").write_text("Thread 0x1")
            assert sorted(path.name for path in stacks.iterdir()) == [
                "rank-00000.group-2.txt",
                "rank-00000.txt",
            ]
    assert (stacks / "rank-00000.group-2.txt").read_text() == "Thread 0x1"


def test_deleted_stacks_do_not_fail_the_run(tmp_path: Path) -> None:
    """An older version of a late group deleted the file while it was open."""
    with watched(a_session(tmp_path)):
        (RunDir(tmp_path).attempt(1).stacks / "rank-00000.txt").unlink()


def test_checkpoint_removed_by_a_late_cleanup_is_restored(tmp_path: Path) -> None:
    """Group 1 decides to remove step 10; before it renames the folder, group 2 commits step 10 again."""
    run_dir = RunDir(tmp_path)
    for epoch, act in ((1, "put_aside"), (1, "retire")):
        checkpoint(run_dir, 10, epoch=2, weights=b"new")
        ledger = open_store(run_dir, Fence(1, epoch))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("train_loop.checkpoint.store.folder.check_fence", lambda *_: None)
            run_dir.raise_fence_to(Fence(1, 2), by="b")
            getattr(ledger, act)(10)
        assert list(run_dir.manifests()) == [10]
        open_store(run_dir, Fence(1, 2)).put_aside(10)
