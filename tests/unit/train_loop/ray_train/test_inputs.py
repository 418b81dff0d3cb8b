"""Unavailable data and models: only a missing path is retried."""

import json
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.torchrun import write_tokens
from tests.support.waiting import wait_for
from train_loop.data.dataset import Dataset
from train_loop.data.prepare.packing import Sample
from train_loop.data.shards import write_part
from train_loop.errors import DataError
from train_loop.faults.failure import failed
from train_loop.model.folder import model_shape
from train_loop.ray_train.inputs import read_inputs
from train_loop.ray_train.trainer import prepare_samples
from train_loop.ray_train.worker import expect_prepared
from train_loop.run_dir import RunDir, StorageUnavailable, read_lines
from train_loop.run_dir.transient import STORAGE_SECONDS_VARIABLE
from train_loop.spec import JobSpec
from train_loop.telemetry.event_log import EventLog


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
@pytest.mark.parametrize("mount_point", [False, True])
def test_data_on_unavailable_storage_is_retried(
    run_dir: RunDir, data: Path, below: str, prepared: bool, mount_point: bool
) -> None:
    """`prepared`: an earlier attempt found the data. `mount_point`: an empty folder replaces the data."""
    job, journal = job_of(f"{data}{below}"), EventLog(run_dir.attempt(1))
    if prepared:
        prepare_samples(job, run_dir, journal)
    away = data.parent.rename(data.parent.with_name("away"))
    if mount_point:
        data.mkdir(parents=True)
    driver = threading.Thread(target=prepare_samples, args=(job, run_dir, journal))
    driver.start()
    wait_for(lambda: events(run_dir)[-1:] and events(run_dir)[-1]["event"] == "storage_unavailable", "the event")
    if mount_point:
        data.rmdir()
        data.parent.rmdir()
    away.rename(data.parent)
    driver.join(60)
    *_, outage, found, end = events(run_dir)
    assert (outage["root"], outage["event"]) == (f"{data}{below}", "storage_unavailable")
    assert (found["event"], found["samples"], end["event"]) == ("prepared", 40, "storage_available")


def test_data_that_stays_unavailable_fails_the_attempt_retryably(
    run_dir: RunDir, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORAGE_SECONDS_VARIABLE, "0.5")
    with pytest.raises(StorageUnavailable, match="gone is unavailable: it is missing or an empty folder") as raised:
        prepare_samples(job_of(f"{data}/gone"), run_dir, EventLog(run_dir.attempt(1)))
    assert failed(raised.value).retryable


def test_prepared_data_unseen_by_a_host_is_reported_with_the_setting(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "fingerprint"
    folder.mkdir(parents=True)
    part = write_part([Sample(np.arange(4, dtype=np.int32), None, None, [4])], folder)
    dataset = Dataset(fingerprint=folder.name, parts=(part,), sequence_length=4)
    expect_prepared(dataset)
    folder.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageUnavailable, match="not found on this host; TRAINSHED_CACHE must be a folder"):
        expect_prepared(dataset)


def test_unavailable_model_folder_is_retried(tmp_path: Path) -> None:
    folder, away = tmp_path / "model", tmp_path / "away"
    away.mkdir()
    (away / "config.json").write_text(json.dumps(TINY))
    job = spec(model={"path": str(folder), "config": None})
    missing = list[str]()

    def come_back(paths: str, error: BaseException) -> None:
        missing.append(paths)
        away.rename(folder)

    shape = read_inputs(job, partial(model_shape, job.model), on_first_failure=come_back)
    assert shape.layers == TINY["num_hidden_layers"]
    assert missing == [str(folder)]


def test_missing_files_in_an_existing_folder_fail_at_once(run_dir: RunDir, data: Path) -> None:
    with pytest.raises(DataError, match="matches no file"):
        prepare_samples(job_of(f"{data}/*.jsonl"), run_dir, EventLog(run_dir.attempt(1)))
    assert events(run_dir) == []


def test_attempt_without_gpus_on_a_gpu_cluster_warns(
    run_dir: RunDir, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    prepare_samples(job_of(f"{data}"), run_dir, EventLog(run_dir.attempt(1)))
    (warning,) = [event for event in events(run_dir) if event["event"] == "warning"]
    assert str(warning["message"]).startswith("the job requests no GPU and trains on CPUs, but the cluster has 2 GPU")
