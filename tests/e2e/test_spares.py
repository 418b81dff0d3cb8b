"""Spare processes on real Ray: a worker that is started again takes one, with its imports done; nobody else does."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tests.support.own_ray import own_ray
from tests.support.waiting import wait_for
from train_loop import spare
from train_loop.spare import NO_SPARES, WITH_SPARES, Spares

SLOWEST_IMPORT = "train_loop.driver"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray(store_bytes=100_000_000):
        yield


class Worker:
    """What Ray Train's workers are here: an actor that may take a spare."""

    def pid(self) -> int:
        return os.getpid()

    def is_ready(self) -> bool:
        return SLOWEST_IMPORT in sys.modules

    def ask(self) -> None:
        spares = Spares(1)
        spare._WORTH_IT = 0.0
        spares.keep()
        # Once is enough.
        spares.keep()


def start() -> "ray.actor.ActorHandle":
    return ray.remote(num_cpus=0.1, runtime_env=WITH_SPARES)(Worker).remote()


def spares() -> list[int]:
    """Processes that nobody has taken and that have got to their largest import."""
    idle = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "ray::IDLE"]
    return [process.pid for process in idle if "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()]


def test_a_worker_takes_the_spare_that_was_kept_for_it_and_a_task_does_not() -> None:
    first = start()
    assert not ray.get(first.is_ready.remote()), "a process that was taken at once has imported for nobody"
    ray.get(first.ask.remote())
    (kept,) = wait_for(spares, "a spare with its imports")
    task = ray.remote(num_cpus=0.1, runtime_env=NO_SPARES)(os.getpid)
    assert ray.get(task.remote()) != kept
    ray.kill(first)
    second = start()
    assert ray.get(second.pid.remote()) == kept
    wait_for(lambda: ray.get(second.is_ready.remote()), "the rest of its imports")
    assert spares() == []


def test_a_run_that_has_just_begun_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(spare, "_start", asked.append)
    young, none, grown = Spares(2), Spares(0), Spares(2)
    grown._begun = time.monotonic() - spare._WORTH_IT
    for one in (young, none, grown, grown):
        one.keep()
    wait_for(lambda: asked == [2], "the grown run asks")


def test_where_ray_knows_no_such_call_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("train_loop.raylet.NodeManagerServiceStub", lambda channel: object())
    spare._start(1)
    assert "a restart will wait for imports" in caplog.text
