"""Cache folders: one process builds a folder at a time, and a folder is complete or absent."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for
from train_loop.data.prepare.build_lock import build_once
from train_loop.data.prepare.progress import Progress
from train_loop.faults.failure import failed

SLOW = """
import sys, time
from pathlib import Path
from train_loop.data.prepare.build_lock import build_once
folder = Path(sys.argv[1])
def build(work):
    (work / "half").write_text("x")
    while not (folder.parent / "go").exists():
        time.sleep(0.01)
    (work / "whole").write_text("slow")
build_once(folder, build, is_whole=(folder / "whole").exists, report=print)
"""


def slowly(folder: Path) -> "subprocess.Popen[bytes]":
    """Build the folder slowly: wait for a file named `go` next to it."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(folder)], stdout=subprocess.DEVNULL)
    wait_for(lambda: list(folder.parent.glob("*.tmp-*/half")), "a half-built folder")
    return process


def quickly(folder: Path, events: list[str]) -> None:
    def build(work: Path) -> None:
        (work / "whole").write_text("quick")

    build_once(folder, build, is_whole=(folder / "whole").exists, report=lambda event, **_: events.append(event))


def test_second_process_waits_and_uses_the_built_folder(tmp_path: Path) -> None:
    folder, events = tmp_path / "made", list[str]()
    process = slowly(folder)

    def release(event: str, **fields: Any) -> None:
        events.append(event)
        (tmp_path / "go").touch()

    build_once(folder, lambda work: pytest.fail("twice"), is_whole=(folder / "whole").exists, report=release)
    assert events == ["waiting_for_preparation"]
    assert (folder / "whole").read_text() == "slow"
    assert process.wait(timeout=30) == 0


def test_error_of_a_full_disk_names_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    def build(work: Path) -> None:
        (work / "half").write_text("x")
        # As in Arrow, the error of a write does not name the file.
        Path("/dev/full").write_text("x" * 10_000)

    with pytest.raises(OSError, match="No space left on device") as caught:
        build_once(tmp_path / "made", build, is_whole=lambda: False, report=lambda *_, **__: None)
    assert failed(caught.value).reason == f"OSError: [Errno 28] No space left on device: '{tmp_path}'"
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]


def test_build_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    folder, events = tmp_path / "made", list[str]()
    process = slowly(folder)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert not folder.exists()
    quickly(folder, events)
    assert (folder / "whole").read_text() == "quick"
    assert events == []


def test_leftovers_of_this_host_are_removed_and_those_of_others_kept(tmp_path: Path) -> None:
    folder, events = tmp_path / "made", list[str]()
    process = slowly(folder)
    process.kill()
    process.wait(timeout=30)
    (tmp_path / "made.tmp-another-host-1").mkdir()
    quickly(folder, events)
    assert [path.name for path in tmp_path.glob("*.tmp-*")] == ["made.tmp-another-host-1"]


def test_leftovers_of_lost_hosts_are_removed_after_six_hours(tmp_path: Path) -> None:
    hours = {"made.tmp-dead-pod-1": 7, "other.tmp-dead-pod-2": 7, "made.tmp-busy-pod-3": 5, "other.tmp-busy-pod-4": 7}
    for name, age in hours.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0").touch()
        for path in (tmp_path / name / "part-0", tmp_path / name):
            os.utime(path, times=(time.time() - age * 3600,) * 2)
    # The folder is old, but a process still writes to one of its files.
    (tmp_path / "other.tmp-busy-pod-4" / "part-0").write_text("more")
    quickly(tmp_path / "made", [])
    assert sorted(path.name for path in tmp_path.glob("*.tmp-*")) == ["made.tmp-busy-pod-3", "other.tmp-busy-pod-4"]


def test_storage_without_locks_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("filelock._unix.UnixFileLock._acquire", no_lock)
    events: list[str] = []
    quickly(tmp_path / "made", events)
    assert (tmp_path / "made" / "whole").exists()
    assert events == ["warning"]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(work: Path) -> None:
        (work / "half").touch()
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        build_once(tmp_path / "made", fail, is_whole=lambda: False, report=print)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_build_progress_is_reported_with_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, events = [0.0], list[dict[str, Any]]()
    monkeypatch.setattr("train_loop.data.prepare.progress.monotonic", lambda: now[0])
    progress = Progress(lambda event, **fields: events.append({"event": event} | fields), [100, 300, 600])
    for task, read, seconds in ((0, 50, 1), (1, 0, 6), (1, 200, 8), (2, 100, 12)):
        now[0] = seconds
        progress.advance(10, tokens=50, task=task, read=read)
    now[0] = 20
    progress.finish()
    names = ("event", "rows", "tokens", "percent", "eta_seconds")
    assert [tuple(event[name] for name in names) for event in events] == [
        ("prepare_progress", 20, 100, 10.0, 54),
        ("prepare_progress", 40, 200, 50.0, 12),
        ("prepare_progress", 40, 200, 100.0, 0),
    ]
