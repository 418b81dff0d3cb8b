"""Spare processes on real Ray: only a restarted worker takes one, with its imports done."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig

from tests.support.builders.searches import seeds
from tests.support.builders.specs import spec
from tests.support.ranks.own_ray import own_ray
from tests.support.ranks.spare_worker import Worker, spare_environment
from tests.support.waiting import wait_for
from train_loop.data.order import Order, StepOrder
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import StreamPlan
from train_loop.ray_train import prestart, raylet
from train_loop.ray_train.prestart import Standby, start_ahead
from train_loop.ray_train.trainer import Trainer
from train_loop.spec import ScalingSpec
from train_loop.system.ray_env import Environment, worker_environment


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # If set for all tests, it would hide what a spare reads before it is assigned.
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with own_ray(store_bytes=100_000_000, forks=False):
            yield


def start(environment: Environment) -> "ray.actor.ActorHandle":
    return ray.remote(num_cpus=0.1, runtime_env=environment)(Worker).remote()


def scaling(workers: int, *, cpus: float = 0.1) -> ScalingSpec:
    return ScalingSpec(num_workers=workers, resources_per_worker={"CPU": cpus})


def spares(folder: Path) -> list[int]:
    """Return the unassigned processes that have done their imports."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "ray::IDLE" and (folder / str(process.pid)).exists():
                found.append(process.pid)
    return found


def test_restarted_worker_takes_its_spare_and_a_task_does_not(tmp_path: Path) -> None:
    environment = spare_environment(tmp_path)
    first = start(environment)
    ray.get(first.request_spares.remote())
    (kept,) = wait_for(lambda: spares(tmp_path), "a spare with its imports")
    assert ray.get(first.task.remote()) != kept
    threads = ray.get(first.threads.remote())
    ray.kill(first)
    second = start(environment)
    assert ray.get(second.pid.remote()) == kept
    assert ray.get(second.is_ready.remote())
    assert ray.get(second.threads.remote()) == threads == 1
    assert spares(tmp_path) == []


def test_ray_data_starts_in_a_worker_and_takes_no_spare(tmp_path: Path) -> None:
    """Two threads that import torch at once end the process of Ray Data's coordinator, and the run's worker group."""
    rows = tmp_path / "rows"
    rows.mkdir()
    pq.write_table(pa.table({"ids": [[i] * 4 for i in range(40)]}), rows / "rows.parquet")
    data = {"train": {"path": str(rows)}, "columns": {"input_ids": "ids"}, "packing": False, "sequence_length": 4}
    order = StepOrder(Order(40, 0, shuffle=False, dataset="x", end=40), 1, 4)
    plan = StreamPlan(find_dataset(spec(data=data), tmp_path), order, 0, 10)
    worker = start(spare_environment(tmp_path))
    ray.get(worker.request_spares.remote())
    kept = wait_for(lambda: spares(tmp_path), "a spare with its imports")
    for _ in range(seeds(2, more=200)):
        assert ray.get(worker.read.remote(plan)) == list(range(40))
    assert spares(tmp_path) == kept


def test_only_an_older_run_requests_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = list[int]()
    monkeypatch.setattr(prestart, "_start_here", requested.append)
    young, none, grown = Standby(2), Standby(0), Standby(2)
    grown._due = time.monotonic()
    for one in (young, none, grown, grown):
        one.keep()
    wait_for(lambda: requested == [2], "the grown run requests spares")


def test_missing_prestart_call_only_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("train_loop.ray_train.raylet.NodeManagerServiceStub", lambda channel: object())
    start_ahead(scaling(1), worker_environment(cpus=1))
    wait_for(lambda: "workers will wait for imports" in caplog.text, "a warning")
    assert "no attribute 'PrestartWorkers'" in caplog.text


def test_workers_take_the_processes_started_by_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # On a slow machine, the processes would be late, or exit before they are taken.
    for name in ("_ROOM_SECONDS", "_KEPT_AHEAD"):
        monkeypatch.setattr(prestart, name, 600)
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
    environment, ranks = spare_environment(tmp_path), tmp_path / "ranks"
    ranks.mkdir()

    def work() -> None:
        (ranks / str(os.getpid())).touch()

    start_ahead(scaling(2), environment)
    ahead = wait_for(lambda: found if len(found := spares(tmp_path)) == 2 else None, "a process for each worker")
    Trainer(
        work,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        run_config=RunConfig(storage_path=str(tmp_path / "ray"), worker_runtime_env=environment),
    ).fit()
    assert sorted(int(file.name) for file in ranks.iterdir()) == sorted(ahead)


def test_nothing_is_prestarted_without_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    requested, reads = list[Mapping[str, int]](), list[int]()
    usable = raylet.usable

    def count_and_read() -> tuple[dict[str, Mapping[str, float]], dict[str, Mapping[str, float]]]:
        reads.append(1)
        return usable() if len(reads) > 2 else ({}, {})

    monkeypatch.setattr(prestart, "_ROOM_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(raylet, "prestart", lambda counts, *_, **__: requested.append(counts))
    monkeypatch.setattr(prestart, "_ROOM_SECONDS", 0.0)
    prestart._start_ahead(scaling(1, cpus=100_000.0), worker_environment(cpus=1))
    assert requested == [], "expected no start without capacity"
    monkeypatch.setattr(raylet, "usable", count_and_read)
    monkeypatch.setattr(prestart, "_ROOM_SECONDS", 60.0)
    prestart._start_ahead(scaling(1), worker_environment(cpus=1))
    assert [list(counts.values()) for counts in requested] == [[1]]
    assert len(reads) == 3
