"""Storage roots of the service, and the guard that fails fast while storage is unavailable."""

import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from structlog.testing import capture_logs

from service.adapters.storage.roots import StorageRoots, root_of
from service.adapters.storage.timeouts import StorageGuard
from service.errors import RunFileRefused, StorageAway
from train_loop.run_dir import ROOT_MARKER, IrregularFileError, StorageUnavailable, forget_expected, storage_path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs"
    forget_expected(tmp_path / "runs")


def test_root_is_created_once_and_never_again(tmp_path: Path, place: Path) -> None:
    memory = tmp_path / "roots.json"
    marker = StorageRoots(memory).open(place.as_uri())
    assert (place / ROOT_MARKER).exists()
    shutil.rmtree(place)
    for roots in (StorageRoots(memory), StorageRoots(memory)):
        with pytest.raises(StorageUnavailable):
            roots.open(place.as_uri())
        with pytest.raises(StorageUnavailable):
            roots.check(place.as_uri())
    # Try an empty mount point, then another storage.
    place.mkdir()
    with pytest.raises(StorageUnavailable):
        StorageRoots(memory).open(place.as_uri())
    (place / ROOT_MARKER).write_text('{"id": "another"}')
    with pytest.raises(StorageUnavailable, match="another"):
        StorageRoots(memory).open(place.as_uri())
    (place / ROOT_MARKER).write_text(marker.model_dump_json())
    assert StorageRoots(memory).open(place.as_uri()).id == marker.id


def test_root_without_marker_is_adopted_unless_it_is_empty(place: Path) -> None:
    roots = StorageRoots(used=lambda root: True)
    with pytest.raises(StorageUnavailable, match="is empty"):
        roots.open(place.as_uri())
    assert not place.exists()
    (place / "default").mkdir(parents=True)
    roots.check(place.as_uri())
    roots.open(place.as_uri())
    assert (place / ROOT_MARKER).exists()


def test_second_service_takes_the_marker_of_the_first(tmp_path: Path, place: Path) -> None:
    first = StorageRoots(tmp_path / "one.json").open(place.as_uri())
    assert StorageRoots(tmp_path / "two.json").open(place.as_uri()).id == first.id


def test_guard_reports_outage_of_object_storage_at_first_failure() -> None:
    root = "memory://runs-that-go"
    roots = StorageRoots()
    roots.open(root)
    guard = StorageGuard(partial(roots.check, max_age=0.0))
    guard.probe(root, seconds=5)
    MemoryFileSystem().rm("/runs-that-go", recursive=True)
    # `check` reuses a result of the last five seconds.
    roots.check(root)

    def fail() -> None:
        raise TimeoutError("no answer within 2 s")

    with pytest.raises(StorageAway, match=r"storage memory://runs-that-go has been unavailable since .* no answer"):
        guard.call(root, fail, seconds=5)
    forget_expected(storage_path(root))


def test_root_of_a_run_dir_is_two_folders_above() -> None:
    assert root_of("s3://runs/all/default/job-1") == "s3://runs/all"


def test_guard_fails_fast_while_storage_hangs_and_logs_each_change_once() -> None:
    heal, calls = threading.Event(), list[float]()

    def hang(root: str = "") -> None:
        calls.append(time.monotonic())
        heal.wait()

    guard = StorageGuard(hang)
    with capture_logs() as logs:
        for _ in range(50):
            with pytest.raises(StorageAway, match="no answer within"):
                guard.call("file:///mnt", hang, seconds=0.05)
        # The first call also probes the root. Each call that began would have waited.
        assert len(calls) <= 3
        heal.set()
        assert guard.call("file:///other", lambda: 1, seconds=1.0) == 1
        while guard.outage("file:///mnt") is not None:
            try:
                guard.call("file:///mnt", hang, seconds=1.0)
            except StorageAway:
                heal.wait(0.05)
                time.sleep(0.05)
    assert [entry["event"] for entry in logs] == ["storage_unavailable", "storage_available"]


def test_guard_reports_a_link_in_a_run_directory_as_a_conflict() -> None:
    guard = StorageGuard(lambda root: None)

    def refused() -> None:
        raise IrregularFileError("/mnt/default/job-1/spec.json", "symbolic link")

    with pytest.raises(RunFileRefused, match=r"^/mnt/default/job-1/spec.json is a symbolic link; only regular files"):
        guard.call("file:///mnt", refused, seconds=1.0)
    assert guard.outage("file:///mnt") is None


def test_guard_reports_a_broken_file_without_marking_the_root_unavailable() -> None:
    guard = StorageGuard(lambda root: None)

    def broken() -> None:
        raise OSError(5, "Input/output error", "/mnt/file")

    with pytest.raises(StorageAway, match="Input/output error") as raised:
        guard.call("file:///mnt", broken, seconds=1.0)
    assert raised.value.since is None
    assert guard.outage("file:///mnt") is None
    with pytest.raises(ZeroDivisionError):
        guard.call("file:///mnt", lambda: 1 // 0, seconds=1.0)
