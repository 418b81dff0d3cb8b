"""A driver whose data is away: it waits for a path that is missing, and for nothing else."""

import threading
from pathlib import Path

import pytest

from tests.support.specs import spec
from tests.support.torchrun import write_tokens
from tests.support.waiting import wait_for
from train_loop.attempt import prepare_samples
from train_loop.errors import DataError
from train_loop.journal import Journal
from train_loop.run_dir import RunDir, read_lines
from train_loop.run_dir.transient import STORAGE_SECONDS_VARIABLE
from train_loop.spec import JobSpec


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "runs" / "job").mkdir(parents=True)
    return RunDir(tmp_path / "runs" / "job")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "mounted" / "data"
    folder.mkdir(parents=True)
    write_tokens(folder / "tokens.parquet", rows=40, length=32, vocab=384)
    return folder


def job_of(path: str) -> JobSpec:
    return spec(data={"train": {"path": path}, "columns": {"input_ids": "ids"}, "packing": False})


def events(run_dir: RunDir) -> list[dict[str, object]]:
    return list(read_lines(run_dir.attempt(1).events))


@pytest.mark.parametrize("below", ["", "/tokens.parquet", "/*.parquet"])
@pytest.mark.parametrize("prepared", [False, True])
def test_data_whose_storage_is_away_is_waited_for(run_dir: RunDir, data: Path, below: str, prepared: bool) -> None:
    """Prepared: an earlier attempt has found the data."""
    job, journal = job_of(f"{data}{below}"), Journal(run_dir.attempt(1))
    if prepared:
        prepare_samples(job, run_dir, journal)
    away = data.parent.rename(data.parent.with_name("away"))
    driver = threading.Thread(target=prepare_samples, args=(job, run_dir, journal))
    driver.start()
    wait_for(lambda: events(run_dir)[-1:] and events(run_dir)[-1]["event"] == "storage_unavailable", "the event")
    away.rename(data.parent)
    driver.join(60)
    *_, outage, found, end = events(run_dir)
    assert (outage["root"], outage["event"]) == (f"{data}{below}", "storage_unavailable")
    assert (found["event"], found["samples"], end["event"]) == ("prepared", 40, "storage_available")


def test_data_that_stays_away_fails_with_the_error_of_its_path(
    run_dir: RunDir, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORAGE_SECONDS_VARIABLE, "0.5")
    with pytest.raises(DataError, match="gone matches no file"):
        prepare_samples(job_of(f"{data}/gone"), run_dir, Journal(run_dir.attempt(1)))


def test_files_that_are_missing_in_a_folder_that_is_there_fail_at_once(run_dir: RunDir, data: Path) -> None:
    with pytest.raises(DataError, match="matches no file"):
        prepare_samples(job_of(f"{data}/*.jsonl"), run_dir, Journal(run_dir.attempt(1)))
    assert events(run_dir) == []
