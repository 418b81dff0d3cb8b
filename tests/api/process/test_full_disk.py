"""Answers and log of a service while its disk is full or another process locks its database."""

import os
import shutil
import sqlite3
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from service.adapters.storage.roots import StorageRoots
from service.adapters.storage.run_dirs import LocalRunDirs
from service.adapters.storage.run_dirs_with_timeouts import GuardedRunDirs
from service.adapters.storage.timeouts import StorageGuard
from service.domain.jobs.job import JobState
from service.domain.jobs.reason import Code
from tests.support.builders.checkpoints import checkpoint
from tests.support.fakes.service import FakeService
from tests.support.servers.served import Served, served
from tests.support.waiting import wait_for


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 6 MB and 400 files."""
    if os.geteuid() != 0:
        pytest.skip("a file system of 6 MB takes root to mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m,nr_inodes=400,mode=0700", "none", str(folder)]
    if (done := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        deque(iter(lambda: filler.write(b"x" * 4096), 0), maxlen=0)


def _fill_with_files(folder: Path) -> None:
    folder.mkdir()
    with pytest.raises(OSError, match="No space left"):
        deque(map(os.mkdir, (folder / str(number) for number in range(1000))), maxlen=0)


def _remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def _key(service: Served, name: str) -> tuple[int, str | None, bool]:
    answer = service.client.post("/keys", json={"name": name, "roles": {"nlp": "editor"}})
    return answer.status_code, answer.json().get("code"), "retry-after" in answer.headers


def _webhook(service: Served, number: int) -> int:
    url = f"https://hooks.example/{number}"
    return service.client.post("/webhooks", json={"project": "nlp", "url": url}).status_code


@pytest.mark.slow
def test_full_disk_returns_507_and_logs_no_secret(small_disk: Path) -> None:
    with served(small_disk, TRAINSHED_DATABASE_CALL_SECONDS="0.5") as service:
        service.takes_jobs()
        assert _key(service, "first") == (201, None, False)

        _fill(small_disk / "filler")
        # The first writes may succeed, until SQLite has used up the space that it had allocated.
        answers = [_key(service, f"full-{number}") for number in range(40)]
        assert answers[-1] == (507, "storage_full", True)
        assert {status for status, _, _ in answers} <= {201, 507}
        assert service.trouble() == "storage_full"
        assert service.client.get("/readyz").status_code == 503
        keys = [key["name"] for key in service.client.get("/keys").json()["data"]]
        assert len(keys) == 1 + sum(status == 201 for status, _, _ in answers)
        (small_disk / "filler").unlink()
        wait_for(lambda: service.trouble() is None, "a service that is ready again")
        assert _key(service, "again") == (201, None, False)

        with closing(sqlite3.connect(small_disk / "trainshed.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert [_webhook(service, number) for number in range(3)] == [503] * 3
            began = time.monotonic()
            with ThreadPoolExecutor(15) as threads:
                refused = list(threads.map(lambda _: _key(service, "locked"), range(30)))
            seconds = time.monotonic() - began
            assert set(refused) == {(503, "database_unreachable", True)}
            assert service.trouble() == "database_unreachable"
            assert len(service.client.get("/keys").json()["data"]) == len(keys) + 1
        wait_for(lambda: service.trouble() is None, "a service that is ready again")
        log = service.log.read_text()
    assert "Traceback" not in log
    assert "whsec_" not in log
    assert "database_failed" in log
    lines = [line for line in log.splitlines() if "status=503" in line]
    assert len(lines) <= 3 + seconds + 1
    assert "left_out=" in log


def test_full_storage_of_runs_returns_507_to_writes_and_serves_reads(small_disk: Path) -> None:
    roots = StorageRoots()
    run_dirs = GuardedRunDirs(LocalRunDirs(roots), StorageGuard(roots.check))
    service = FakeService(small_disk, run_dirs=run_dirs)
    job = service.submit()
    service.reconciler().run_once()
    checkpoint(service.run_dir(job.id), 3)
    with service.client() as client:
        _fill(small_disk / "filler")
        refused = client.post(f"/jobs/{job.id}/checkpoints/3/export")
        assert (refused.status_code, refused.json()["code"]) == (507, "storage_full")
        assert "has no space left" in refused.json()["detail"]
        assert refused.headers["retry-after"] == "5"
        assert len(client.get(f"/jobs/{job.id}/checkpoints").json()["data"]) == 1


FAULTS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "full": (lambda disk: _fill(disk / "filler"), lambda disk: (disk / "filler").unlink(), "free space there, or"),
    "files": (
        lambda disk: _fill_with_files(disk / "more"),
        lambda disk: shutil.rmtree(disk / "more"),
        "free space there",
    ),
    "read-only": (lambda disk: _remount(disk, "ro"), lambda disk: _remount(disk, "rw"), "make it writable again"),
}
"""Faults of a disk: how each begins and ends, and what helps."""


@pytest.mark.parametrize("fault", FAULTS)
def test_job_waits_while_its_disk_cannot_be_written_and_then_starts(small_disk: Path, fault: str) -> None:
    roots = StorageRoots()
    run_dirs = GuardedRunDirs(LocalRunDirs(roots), StorageGuard(roots.check))
    service = FakeService(small_disk, run_dirs=run_dirs)
    begin, end, remedy = FAULTS[fault]
    job = service.submit()
    begin(small_disk)
    try:
        for _ in range(3):
            service.reconciler().run_once()
        reason = service.get(job.id).reason
    finally:
        end(small_disk)
    assert reason is not None
    assert (reason.code, service.cluster.launches) == (Code.STORAGE_UNAVAILABLE, [])
    assert str(reason.remedy).startswith(remedy)
    assert str(reason.remedy).endswith("; the job then continues")
    service.reconciler().run_once()
    started = service.get(job.id)
    assert (started.state, started.reason, len(service.cluster.launches)) == (JobState.STARTING, None, 1)
    assert [file.name for file in service.run_dir(job.id).root.rglob("*") if file.name.startswith(".")] == []
