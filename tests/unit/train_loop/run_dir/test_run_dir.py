"""The run directory: round trips of its files, and skipped torn writes."""

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.builders.specs import spec
from train_loop.run_dir import (
    CACHE_VARIABLE,
    NO_FENCE,
    Fence,
    JsonLines,
    Outcome,
    RunDir,
    Stop,
    local_path,
    read_lines,
    write_durably,
)
from train_loop.run_dir.files.durable import create_new
from train_loop.run_dir.markers import create_root_marker


def test_full_disk_leaves_no_file_and_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    old = tmp_path / "old"
    write_durably(old, "before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        writes: dict[str, Callable[[], object]] = {
            "old": lambda: write_durably(old, "after"),
            "new": lambda: create_new(tmp_path / "new", b"x"),
            ".trainshed-root.json": lambda: create_root_marker(tmp_path),
        }
        for name, write in writes.items():
            with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/{name}'$"):
                write()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"old": "before"}
    # A retry is the first to create the file.
    create_new(tmp_path / "new", b"x")


def test_run_directory_belongs_to_one_spec(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_spec(spec())
    run_dir.write_spec(spec())
    assert run_dir.spec() == spec()
    with pytest.raises(ValueError, match=r"holds another spec \(/data/columns/input_ids, /data/columns/text, /name\);"):
        run_dir.write_spec(spec(data={"columns": {"input_ids": "ids"}}).model_copy(update={"name": "other"}))


def test_run_resumes_at_another_size_only_with_equal_batches(tmp_path: Path) -> None:
    fixed, following = RunDir(tmp_path / "fixed"), RunDir(tmp_path / "following")
    batch = {"training": {"global_batch_size": 8}}
    fixed.write_spec(spec(**batch))
    other = {"scaling": {"num_workers": 2}, "strategy": {"ulysses_size": 2}}
    fixed.write_spec(spec(**batch, **other))
    assert fixed.spec() == spec(**batch), "expected one write of the spec"
    with pytest.raises(ValueError, match="holds another spec"):
        fixed.write_spec(spec(training={"global_batch_size": 4}, **other))
    following.write_spec(spec())
    with pytest.raises(ValueError, match=r"if training.global_batch_size is set"):
        following.write_spec(spec(**other))


def test_control_files_and_outcome_survive_a_round_trip(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert (run_dir.stop(), run_dir.fence(), run_dir.attempt(1).outcome()) == (None, NO_FENCE, None)
    stop, outcome = Stop(mode="cancel", checkpoint=False, deadline=5.0), Outcome(result="cancelled", step=3)
    run_dir.write_stop(stop)
    run_dir.write_fence(2)
    run_dir.attempt(1).write_outcome(outcome)
    assert (run_dir.stop(), run_dir.fence(), run_dir.attempt(1).outcome()) == (stop, Fence(2), outcome)


@pytest.mark.parametrize(
    ("run_dir", "setting", "cache"),
    [
        ("file:///shared/runs/default/job-1", None, "/shared/runs/_cache"),
        ("file:///shared/runs/default/job-1", "/cache", "/cache"),
        ("s3://bucket/runs/default/job-1", "/cache", "/cache"),
        ("s3://bucket/runs/default/job-1", None, "/home/ops/runs/_cache"),
    ],
)
def test_prepared_data_lies_next_to_the_runs_or_at_the_service_setting(
    monkeypatch: pytest.MonkeyPatch, run_dir: str, setting: str | None, cache: str
) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", "/home/ops")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(CACHE_VARIABLE, setting)
    assert str(RunDir.at(run_dir).cache) == cache


def test_storage_without_a_package_is_rejected_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"nowhere:// storage cannot be used: .*install the package that fsspec names"):
        RunDir.at("nowhere://bucket/run")


def test_lines_are_numbered_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    JsonLines(path, attempt=1).append(event="a")
    JsonLines(path, attempt=1).append(event="b", value=math.inf)
    found = list(read_lines(path))
    assert [(line["seq"], line["attempt"], line["event"]) for line in found] == [(1, 1, "a"), (2, 1, "b")]
    assert found[1]["value"] is None


@pytest.mark.parametrize("torn", [b'{"seq": 2, "ev', b'{"seq": 2, "event": "x"}'])
def test_torn_line_is_skipped_and_the_next_stays_readable(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    lines = JsonLines(path, attempt=1)
    lines.append(event="before")
    with path.open("ab") as file:
        file.write(torn)
    assert [line["event"] for line in read_lines(path)] == ["before"]
    lines.append(event="after")
    assert [line["event"] for line in read_lines(path) if line["event"] != "x"] == ["before", "after"]
    seqs = [line["seq"] for line in read_lines(path)]
    assert seqs == sorted(set(seqs))


def test_numbering_continues_after_a_line_longer_than_the_window(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", attempt=1)
    for _ in range(3):
        lines.append(samples=list(range(5000)))
    assert [line["seq"] for line in read_lines(lines.path)] == [1, 2, 3]


@pytest.mark.parametrize("uri", ["/a/b c?#", "file:/a/b%20c?#", "file:///a/b%20c?#", "file://localhost/a/b%20c?#"])
def test_file_uri_equals_its_local_path(uri: str) -> None:
    assert local_path(uri) == Path("/a/b c?#")


@pytest.mark.parametrize("uri", ["file://host/a", "file:a"])
def test_file_uri_of_another_host_is_rejected(uri: str) -> None:
    with pytest.raises(ValueError, match=f"{uri} names a host or a relative path; write file:///"):
        local_path(uri)
