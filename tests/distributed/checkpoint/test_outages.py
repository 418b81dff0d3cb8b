"""Real storage faults during a save: a full disk, lost permissions, an existing name, an unmount."""

import ctypes
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.test_saver import a_run, a_saver, save_at
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from tests.support.waiting import wait_for
from train_loop.checkpoint.manifest import newest_verified
from train_loop.run_dir import RootMarker, RunDir, expect_run_dir, read_lines, write_run_marker

NEW_MOUNTS, NOBODY = 0x00020000, 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with data that all users can read, unlike the folders of pytest."""
    with tempfile.TemporaryDirectory(prefix="outage-") as name:
        Path(name).chmod(0o755)
        write_tokens(Path(name, "d.parquet"), rows=8, length=32, vocab=384)
        yield Path(name)


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(folder / "run").attempt(1).events))


@contextmanager
def after_delay_event(folder: Path, mend: Callable[[], object]) -> Iterator[None]:
    """Fix the fault as soon as an event reports the delayed save."""

    def mend_after_event() -> None:
        wait_for(
            lambda: any(event["event"] == "checkpoint_delayed" for event in events(folder)),
            "an event that reports the delay",
        )
        mend()

    thread = threading.Thread(target=mend_after_event)
    thread.start()
    yield
    thread.join()


def save_on_a_full_disk(folder: Path) -> None:
    """Save on a small disk of this process, which is full except for a few bytes."""
    run = a_run(folder)
    checkpoints = run.session.run_dir.checkpoints
    checkpoints.mkdir(parents=True)
    assert ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(checkpoints)], check=True)
    filler = checkpoints / "others"
    filler.write_bytes(bytes(8 * 2**20 - 65536))
    saver = a_saver(run)
    with after_delay_event(folder, filler.unlink):
        save_at(run, saver, 1)
        saver.close()
    assert newest_verified(run.session.run_dir)[0] is not None
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_delays_a_save_until_there_is_room(folder: Path) -> None:
    on_ranks(1, save_on_a_full_disk, folder)
    delayed, committed = events(folder)
    assert (delayed["event"], delayed["step"]) == ("checkpoint_delayed", 1)
    assert "No space left on device" in delayed["reason"]
    assert (committed["event"], committed["step"]) == ("checkpoint_committed", 1)


def save_without_rights(folder: Path) -> None:
    """Save as a user without permissions."""
    run = a_run(folder)
    saver = a_saver(run)
    # Root has all permissions.
    me = os.geteuid()
    os.chown(folder, me or NOBODY, -1)
    os.seteuid(me or NOBODY)
    checkpoints = run.session.run_dir.checkpoints
    checkpoints.mkdir(parents=True)
    checkpoints.chmod(0o500)
    with after_delay_event(folder, lambda: checkpoints.chmod(0o700)):
        save_at(run, saver, 1)
        saver.close()
    checkpoints.chmod(0)
    with pytest.raises(PermissionError):
        run.session.run_dir.manifests()
    checkpoints.chmod(0o700)
    os.seteuid(me)


def test_lost_permissions_delay_a_save_and_are_not_taken_for_an_empty_folder(folder: Path) -> None:
    on_ranks(1, save_without_rights, folder)
    delayed, committed = events(folder)
    assert (delayed["event"], delayed["step"]) == ("checkpoint_delayed", 1)
    assert "Permission denied" in delayed["reason"]
    assert (committed["event"], committed["step"]) == ("checkpoint_committed", 1)
    newest, rejected = newest_verified(RunDir(folder / "run"))
    assert newest is not None
    assert rejected == {}


def save_where_a_name_is_taken(folder: Path) -> str | None:
    run = a_run(folder)
    taken = run.session.run_dir.checkpoint(1)
    taken.mkdir(parents=True)
    (taken / "somebody's").write_text("file")
    saver = a_saver(run)
    save_at(run, saver, 1)
    return saver.wait()


def test_existing_name_fails_without_a_retry(folder: Path) -> None:
    (fault,) = on_ranks(1, save_where_a_name_is_taken, folder)
    assert fault is not None
    assert "Directory not empty" in fault
    assert [event["event"] for event in events(folder)] == ["checkpoint_failed"]


def save_while_storage_is_unmounted(folder: Path) -> list[str]:
    """Return what was written to the empty mount point while a run's storage was lazily unmounted."""
    disk, mount_point = folder / "disk", folder / "run"
    disk.mkdir()
    mount_point.mkdir()
    assert ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", disk, mount_point], check=True)
    write_run_marker(mount_point, RootMarker.new())
    expect_run_dir(mount_point)
    run, reported = a_run(folder), list[str]()
    saver, report = a_saver(run), run.session.journal.event

    def event(name: str, **fields: Any) -> None:
        report(name, **fields)
        reported.append(name)

    run.session.journal.event = event  # type: ignore[method-assign]
    run.session.journal.metrics(step=1)
    subprocess.run(["umount", "--lazy", mount_point], check=True)
    run.session.journal.metrics(step=2)
    save_at(run, saver, 2)
    # The lines wait for the storage, too, and may do so before the save.
    wait_for(lambda: "checkpoint_delayed" in reported, "the save waits for its storage")
    found = os.listdir(mount_point)
    subprocess.run(["mount", "--bind", disk, mount_point], check=True)
    saver.close()
    run.session.journal.flush()
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_unmounted_storage_delays_a_save_and_loses_nothing(folder: Path) -> None:
    (at_the_mount_point,) = on_ranks(1, save_while_storage_is_unmounted, folder)
    assert at_the_mount_point == []
    run_dir = RunDir(folder / "disk")
    assert list(run_dir.manifests()) == [2]
    assert [line["step"] for line in read_lines(run_dir.attempt(1).metrics)] == [1, 2]
    names = [line["event"] for line in read_lines(run_dir.attempt(1).events)]
    assert sorted(names) == ["checkpoint_committed", "checkpoint_delayed", "storage_available", "storage_unavailable"]
