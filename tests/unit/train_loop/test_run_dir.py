"""The run directory: what is written is read back, torn writes are passed over, and a checkpoint is what verifies."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.specs import spec
from train_loop.checkpoint.manifest import describe_file, newest_verified, verify
from train_loop.checkpoint.retention import keep_newest, remove_leftovers
from train_loop.checkpoint.save import commit
from train_loop.run_dir import DataPosition, JsonLines, Manifest, Outcome, RunDir, Stop, local_path, read_lines


def test_a_run_directory_belongs_to_one_spec(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_spec(spec())
    run_dir.write_spec(spec())
    assert run_dir.spec() == spec()
    with pytest.raises(ValueError, match=r"holds another spec \(/data/columns/input_ids, /data/columns/text, /name\);"):
        run_dir.write_spec(spec(data={"columns": {"input_ids": "ids"}}).model_copy(update={"name": "other"}))


def test_a_run_goes_on_at_another_size_only_if_its_batches_stay(tmp_path: Path) -> None:
    fixed, following = RunDir(tmp_path / "fixed"), RunDir(tmp_path / "following")
    batch = {"training": {"global_batch_size": 8}}
    fixed.write_spec(spec(**batch))
    other = {"scaling": {"num_workers": 2}, "strategy": {"ulysses_size": 2}}
    fixed.write_spec(spec(**batch, **other))
    assert fixed.spec() == spec(**batch), "the spec of a run is written once"
    with pytest.raises(ValueError, match="holds another spec"):
        fixed.write_spec(spec(training={"global_batch_size": 4}, **other))
    following.write_spec(spec())
    with pytest.raises(ValueError, match=r"where training.global_batch_size is given"):
        following.write_spec(spec(**other))


def test_control_files_and_outcome_are_read_back(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert (run_dir.stop(), run_dir.fence(), run_dir.attempt(1).outcome()) == (None, 0, None)
    stop, outcome = Stop(mode="cancel", checkpoint=False, deadline=5.0), Outcome(result="cancelled", step=3)
    run_dir.write_stop(stop)
    run_dir.write_fence(2)
    run_dir.attempt(1).write_outcome(outcome)
    assert (run_dir.stop(), run_dir.fence(), run_dir.attempt(1).outcome()) == (stop, 2, outcome)


def test_other_storage_than_local_is_refused() -> None:
    with pytest.raises(ValueError, match="only file:// storage is supported yet"):
        RunDir.at("s3://bucket/run")


def test_lines_are_numbered_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    JsonLines(path, attempt=1).append(event="a")
    JsonLines(path, attempt=1).append(event="b", value=math.inf)
    found = list(read_lines(path))
    assert [(line["seq"], line["attempt"], line["event"]) for line in found] == [(1, 1, "a"), (2, 1, "b")]
    assert found[1]["value"] is None


@pytest.mark.parametrize("torn", [b'{"seq": 2, "ev', b'{"seq": 2, "event": "x"}'])
def test_a_torn_line_is_passed_over_and_does_not_spoil_the_next(tmp_path: Path, torn: bytes) -> None:
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


def test_numbering_goes_on_after_a_line_longer_than_the_window(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", attempt=1)
    for _ in range(3):
        lines.append(samples=list(range(5000)))
    assert [line["seq"] for line in read_lines(lines.path)] == [1, 2, 3]


def checkpoint(run_dir: RunDir, step: int, **files: bytes) -> Path:
    """A committed checkpoint of the given files."""
    folder = run_dir.checkpoint_in_progress(step, 1)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    fields: dict[str, Any] = {"attempt": 1, "time": 0.0, "fingerprint": "f", "dataset": "d", "world": 1}
    manifest = Manifest(
        step=step,
        tokens=step,
        position=DataPosition(),
        mesh={"fsdp": 1},
        versions={},
        files={name: describe_file(folder / name) for name in files},
        **fields,
    )
    commit(folder, run_dir.checkpoint(step), manifest)
    return run_dir.checkpoint(step)


def test_the_newest_checkpoint_that_verifies_is_taken(tmp_path: Path) -> None:
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


def test_a_truncated_file_is_named_with_its_sizes(tmp_path: Path) -> None:
    folder = checkpoint(RunDir(tmp_path), 10, weights=b"abc")
    (folder / "weights").write_bytes(b"ab")
    assert verify(folder, RunDir(tmp_path).manifests()[10]) == ["weights has 2 bytes, not 3"]


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "not committed", "another step's manifest"])
def test_what_was_never_committed_is_no_checkpoint(tmp_path: Path, damage: str) -> None:
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
            folder.rename(run_dir.checkpoint_in_progress(20, 1))
        case "another step's manifest":
            manifest.write_bytes((run_dir.checkpoint(10) / "manifest.json").read_bytes())
    newest, _ = newest_verified(run_dir)
    assert newest is not None
    assert newest.step == 10


def test_retention_keeps_the_newest_and_leaves_saves_in_flight_alone(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (10, 20, 30):
        checkpoint(run_dir, step, weights=b"abc")
    run_dir.checkpoint_in_progress(40, 1).mkdir()
    keep_newest(run_dir, 2)
    assert {path.name for path in run_dir.checkpoints.iterdir()} == {
        "step-00000020",
        "step-00000030",
        "step-00000040.tmp-1",
    }
    remove_leftovers(run_dir, 1)
    assert {path.name for path in run_dir.checkpoints.iterdir()} == {"step-00000020", "step-00000030"}


def test_a_step_trained_again_replaces_the_checkpoint_that_was_rejected(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (checkpoint(run_dir, 10, weights=b"abc") / "weights").write_bytes(b"bad")
    checkpoint(run_dir, 10, weights=b"new")
    newest, rejected = newest_verified(run_dir)
    assert newest is not None
    assert (newest.step, rejected) == (10, {})


@pytest.mark.parametrize("uri", ["/a/b c?#", "file:/a/b%20c?#", "file:///a/b%20c?#", "file://localhost/a/b%20c?#"])
def test_a_local_path_is_a_file_uri_too(uri: str) -> None:
    assert local_path(uri) == Path("/a/b c?#")


@pytest.mark.parametrize("uri", ["file://host/a", "file:a"])
def test_a_file_uri_of_another_host_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=f"{uri} names a host or a relative path; write file:///"):
        local_path(uri)
