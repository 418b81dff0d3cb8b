"""Storage outages: detection, one retry rule, and no creation of missing roots."""

import errno
import logging
import os
import pickle
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.servers.storage import bucket_of_runs, run_dir_on_s3
from train_loop.run_dir import (
    ROOT_MARKER,
    RUN_MARKER,
    Outcome,
    RootMarker,
    RunDir,
    StorageUnavailable,
    check_storage,
    check_writable,
    create_root_marker,
    expect_root,
    expect_run_dir,
    forget_expected,
    is_transient,
    list_folder,
    make_folder,
    read_lines,
    read_whole,
    storage_path,
    storage_seconds,
    write_durably,
    write_run_marker,
)
from train_loop.run_dir import root as root_module
from train_loop.system.limited_log import LimitedLog
from train_loop.system.retry import retry_storage
from train_loop.telemetry import event_log as journal_module
from train_loop.telemetry.event_log import EventLog, last_word


class Mount:
    """A storage root that can be unmounted: moved away, with an empty mount point or nothing left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._away = root.with_name(f"{root.name}-away")
        root.mkdir()

    def unmount(self, *, leave_mount_point: bool = True) -> None:
        """Remove the storage from its place."""
        if not self._away.exists():
            self.root.rename(self._away)
            if leave_mount_point:
                self.root.mkdir()

    def mount(self) -> None:
        """Restore the storage."""
        if self._away.exists():
            if self.root.exists():
                # The mount point must be empty: any file there was written during the outage.
                self.root.rmdir()
            self._away.rename(self.root)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path / "storage")


@pytest.fixture
def run_dir(mount: Mount) -> Iterator[RunDir]:
    """Return a run directory as the service prepares it and a worker expects it."""
    marker = create_root_marker(mount.root)
    run_dir = RunDir(mount.root / "default" / "job-1")
    write_run_marker(run_dir.root, marker)
    expect_run_dir(run_dir.root)
    yield run_dir
    forget_expected(run_dir.root)
    forget_expected(mount.root)


@pytest.mark.parametrize("leave_mount_point", [True, False])
def test_writers_on_unmounted_storage_fail_and_create_nothing(
    mount: Mount, run_dir: RunDir, leave_mount_point: bool
) -> None:
    attempt = run_dir.attempt(1)
    check_storage(run_dir.root)
    mount.unmount(leave_mount_point=leave_mount_point)
    for write in (
        lambda: attempt.write_outcome(Outcome(result="succeeded")),
        lambda: run_dir.write_fence(2),
        lambda: make_folder(run_dir.checkpoints),
        lambda: make_folder(run_dir.cache / "tokens"),
        lambda: write_durably(run_dir.data, "{}"),
        run_dir.manifests,
        run_dir.fence,
        run_dir.stop,
        run_dir.spec,
        lambda: last_word(attempt),
    ):
        with pytest.raises(StorageUnavailable) as raised:
            write()
        assert is_transient(raised.value)
    EventLog(attempt).event("workers_ready")
    assert not leave_mount_point or list(mount.root.iterdir()) == []
    mount.mount()
    attempt.write_outcome(Outcome(result="succeeded"))
    assert attempt.outcome() == Outcome(result="succeeded")


def test_storage_with_another_id_is_unavailable(mount: Mount, run_dir: RunDir) -> None:
    check_storage(run_dir.root)
    mount.unmount()
    other = RunDir(mount.root / "default" / "job-1")
    make_it = Path(other.root)
    make_it.mkdir(parents=True)
    (make_it / "root.json").write_text(RootMarker(id="another").model_dump_json())
    with pytest.raises(StorageUnavailable, match="its id is another"):
        run_dir.write_fence(2)


def test_run_dir_from_before_markers_is_recognized_by_its_spec(mount: Mount) -> None:
    run_dir = RunDir(mount.root / "default" / "old")
    write_durably(run_dir.root / "spec.json", "{}")
    expect_run_dir(run_dir.root)
    run_dir.write_fence(1)
    mount.unmount()
    with pytest.raises(StorageUnavailable):
        run_dir.write_fence(2)
    # Earlier versions created this at the mount point.
    Path(run_dir.root / "attempts").mkdir(parents=True)
    with pytest.raises(StorageUnavailable):
        run_dir.write_fence(2)
    shutil.rmtree(mount.root / "default")
    mount.mount()
    run_dir.write_fence(2)
    assert run_dir.fence().attempt == 2
    forget_expected(run_dir.root)


def test_marker_is_created_once_and_the_second_creator_gets_the_first_id(tmp_path: Path) -> None:
    first = create_root_marker(tmp_path)
    assert create_root_marker(tmp_path).id == first.id
    assert list_folder(tmp_path) == [ROOT_MARKER]


def test_missing_file_on_available_storage_is_missing(run_dir: RunDir) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        read_whole(run_dir.root / "spec.json")
    assert not is_transient(raised.value)
    assert run_dir.fence().attempt == 0
    assert run_dir.manifests() == {}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENOTDIR, errno.ETIMEDOUT])
def test_errors_of_absent_storage_are_transient(number: int) -> None:
    assert is_transient(OSError(number, os.strerror(number)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTEMPTY, errno.EDQUOT])
def test_errors_that_need_an_operator_are_not_transient(number: int) -> None:
    assert not is_transient(OSError(number, os.strerror(number)))


def test_missing_file_below_an_unmounted_root_is_transient(mount: Mount, run_dir: RunDir) -> None:
    check_storage(run_dir.root)
    mount.unmount()
    with pytest.raises(FileNotFoundError) as raised:
        (run_dir.root / "spec.json").open()
    assert is_transient(raised.value)


def test_file_in_place_of_a_folder_is_transient_and_an_existing_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError) as in_the_way:
        make_folder(tmp_path / "run")
    with pytest.raises(OSError) as below:
        make_folder(tmp_path / "run" / "attempts")
    assert is_transient(in_the_way.value)
    assert is_transient(below.value)
    with pytest.raises(FileExistsError) as raw:
        (tmp_path / "run").mkdir()
    assert is_transient(raw.value)
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError) as taken:
        (tmp_path / "taken").mkdir()
    assert not is_transient(taken.value)


def _client_error(code: str, status: int) -> Exception:
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = pkgutil.resolve_name("botocore.exceptions:ClientError")(response, "PutObject")
    return error


@pytest.mark.parametrize(
    ("code", "status", "transient"),
    [("InternalError", 500, True), ("SlowDown", 503, True), ("AccessDenied", 403, False), ("NoSuchBucket", 404, False)],
)
def test_server_errors_of_object_storage_are_transient(code: str, status: int, transient: bool) -> None:
    assert is_transient(_client_error(code, status)) is transient


def test_timeouts_and_connection_errors_are_transient() -> None:
    unreachable = pkgutil.resolve_name("botocore.exceptions:EndpointConnectionError")(endpoint_url="http://storage")
    for error in (TimeoutError(), ConnectionRefusedError(), unreachable):
        assert is_transient(error)
    for error in (ValueError("no"), OSError("a file ends too early"), PermissionError()):
        assert not is_transient(error)


def test_retry_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_seconds() == 300.0
    monkeypatch.setenv("TRAINSHED_STORAGE_SECONDS", "0")
    calls = []

    def fail() -> None:
        calls.append(1)
        raise StorageUnavailable("/mnt", "unmounted")

    with pytest.raises(StorageUnavailable):
        retry_storage(fail)
    assert len(calls) == 1


def test_errors_survive_pickling_to_another_rank() -> None:
    error = pickle.loads(pickle.dumps(StorageUnavailable("/mnt", "unmounted")))
    assert (type(error), str(error)) == (
        StorageUnavailable,
        "storage /mnt is unavailable: unmounted",
    )


STEPS = st.lists(st.sampled_from(["metrics", "event", "unmount", "unmount-all", "mount", "retry"]), max_size=30)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_interleaving_of_unmounts_and_appends_loses_no_line(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    mount = Mount(tmp_path_factory.mktemp("mounts") / "storage")
    marker = create_root_marker(mount.root)
    run_dir = RunDir(mount.root / "default" / "job-1")
    write_run_marker(run_dir.root, marker)
    expect_run_dir(run_dir.root)
    with pytest.MonkeyPatch.context() as patch:
        # The step "retry" stands for the thread.
        patch.setattr(journal_module, "_RETRY_SECONDS", 3600.0)
        journal, wanted = EventLog(run_dir.attempt(1)), dict[str, list[int]](metrics=[], event=[])
        for number, step in enumerate(steps):
            if step == "metrics":
                journal.metrics(step=number)
                wanted["metrics"].append(number)
            elif step == "event":
                journal.event("warning", number=number)
                wanted["event"].append(number)
            elif step.startswith("unmount"):
                mount.unmount(leave_mount_point=step == "unmount")
            elif step == "mount":
                mount.mount()
            else:
                journal._write_if_possible()
        mount.mount()
        journal.flush()
    attempt = run_dir.attempt(1)
    events = list(read_lines(attempt.events))
    assert [line["step"] for line in read_lines(attempt.metrics)] == wanted["metrics"]
    assert [line["number"] for line in events if line["event"] == "warning"] == wanted["event"]
    outages = [line["event"] for line in events if line["event"].startswith("storage_")]
    assert outages == ["storage_unavailable", "storage_available"] * (len(outages) // 2)
    forget_expected(run_dir.root)
    forget_expected(mount.root)


def test_lines_are_written_by_the_thread_once_storage_is_back(
    mount: Mount, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_SECONDS", 0.01)
    journal = EventLog(run_dir.attempt(1))
    mount.unmount()
    journal.metrics(step=1)
    retrier = journal._retrier
    assert retrier is not None
    mount.mount()
    retrier.join(timeout=30)
    assert [line["step"] for line in read_lines(run_dir.attempt(1).metrics)] == [1]
    unavailable, available = read_lines(run_dir.attempt(1).events)
    assert (unavailable["event"], unavailable["root"]) == ("storage_unavailable", str(run_dir.root))
    assert unavailable["since"] <= unavailable["time"] + 1
    assert "missing" in unavailable["error"]
    assert available["event"] == "storage_available"


def test_limited_log_writes_a_line_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limited = LimitedLog(logging.getLogger("storage"), seconds=1.0, clock=lambda: now)
    for _ in range(5):
        limited.warning("away: %s", "why")
    now = 1.0
    limited.warning("away: %s", "why")
    assert [record.getMessage() for record in caplog.records] == ["away: why", "away: why (4 more like this)"]


def test_previously_seen_root_is_checked_by_its_marker(mount: Mount) -> None:
    marker = create_root_marker(mount.root)
    expect_root(mount.root, marker.id)
    check_storage(mount.root / "default" / "job-2")
    mount.unmount()
    with pytest.raises(StorageUnavailable, match=ROOT_MARKER):
        make_folder(mount.root / "default" / "job-2")
    mount.mount()
    make_folder(mount.root / "default" / "job-2")
    forget_expected(mount.root)


def test_object_storage_without_its_marker_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_module, "_REMOTE_CHECK_SECONDS", 0.0)
    with bucket_of_runs():
        run_dir, place = run_dir_on_s3("job-1"), storage_path("s3://runs")
        marker = create_root_marker(place)
        assert create_root_marker(place) == marker
        write_run_marker(run_dir.root, marker)
        expect_run_dir(run_dir.root)
        assert (run_dir.stop(), run_dir.manifests()) == (None, {})
        # As in a bucket of the same name at another endpoint.
        (run_dir.root / RUN_MARKER).unlink()
        for read in (run_dir.stop, run_dir.manifests, run_dir.spec):
            with pytest.raises(StorageUnavailable):
                read()
        forget_expected(run_dir.root)
        forget_expected(place)


@pytest.mark.parametrize(
    ("flag", "free", "error"), [(os.ST_RDONLY, 1, errno.EROFS), (0, 0, errno.ENOSPC), (0, 1, None)]
)
def test_read_only_or_full_file_system_is_reported_without_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, free: int, error: int | None
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flag, f_blocks=9, f_bavail=free))
    if error is None:
        check_writable(tmp_path)
        return
    with pytest.raises(OSError, match=os.strerror(error)) as raised:
        check_writable(tmp_path)
    assert raised.value.errno == error
