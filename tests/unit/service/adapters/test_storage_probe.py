"""Storage probe on a folder and on S3; it leaves no files."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.adapters.storage import probe as storage_probe
from service.adapters.storage.probe import RunsProbe
from service.errors import StorageFault
from tests.support.servers.s3 import S3Server, s3_server
from train_loop.run_dir import answer_file, list_folder, storage_path, write_durably


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        server.bucket("runs")
        yield server


@pytest.fixture(params=["folder", "s3"])
def runs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a folder or a bucket for run directories."""
    if request.param == "folder":
        return (tmp_path / "runs").as_uri()
    for name, value in request.getfixturevalue("s3").environment().items():
        monkeypatch.setenv(name, value)
    return "s3://runs/all"


def test_probe_of_good_storage_passes_and_leaves_no_files(runs: str) -> None:
    probe = RunsProbe(runs)
    assert runs in probe.read()
    assert "file written, synced, read" in probe.write()
    assert probe.replace()
    assert list_folder(storage_path(runs)) == []


def test_answers_returns_nodes_that_wrote_the_token(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_probe, "_ARRIVAL_SECONDS", 0.5)
    probe, folder = RunsProbe(runs), f"{runs}/_doctor-1"
    token = probe.leave_token(folder)
    write_durably(storage_path(folder) / answer_file("n1"), token)
    write_durably(storage_path(folder) / answer_file("n2"), "an old one")
    assert probe.answers(folder, token, ["n1", "n2", "n3"]) == {"n1"}
    probe.remove(folder)
    probe.remove(folder)
    assert list_folder(storage_path(runs)) == []


def test_missing_root_is_named(tmp_path: Path) -> None:
    probe = RunsProbe((tmp_path / "runs").as_uri(), [(tmp_path / "data").as_uri()])
    with pytest.raises(StorageFault, match="data"):
        probe.read()


def test_write_to_unwritable_folder_raises_os_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(OSError):
        RunsProbe((tmp_path / "runs").as_uri()).write()


def test_partially_visible_file_fails_the_atomic_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            for place in range(0, len(text), 100):
                file.write(text[place : place + 100])
                file.flush()

    monkeypatch.setattr(storage_probe, "write_durably", in_place)
    monkeypatch.setattr(storage_probe, "_REPLACEMENTS", 1000)
    with pytest.raises(StorageFault, match="partial content"):
        RunsProbe(tmp_path.as_uri()).replace()
    assert os.listdir(tmp_path) == []


def test_object_storage_without_exclusive_create_fails_the_atomic_check(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage_probe, "create_object", lambda path, content: path.write_bytes(content))
    with pytest.raises(StorageFault, match="created again"):
        RunsProbe("s3://runs/all").replace()
    assert list_folder(storage_path("s3://runs/all")) == []
