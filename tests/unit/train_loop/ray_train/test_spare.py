"""Spare processes: imports while Ray assigns the process, and spares for new nodes."""

import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.support.waiting import wait_for
from train_loop.ray_train import prestart, raylet
from train_loop.spec import ScalingSpec

TAKEN_MEANWHILE = """
import importlib, os, sys, threading, time
os.environ["TRAINSHED_AHEAD_UNTIL"] = str(time.time() + 600)
from train_loop.ray_train import warm_up


begun = threading.Event()


def begin_torch_together(event, arguments):
    # If neither has torch, the thread of the actor begins with it, and continues once the other thread waits for it.
    if event != "import":
        return
    if threading.current_thread() is threading.main_thread():
        if arguments[0] == "torch":
            begun.set()
        elif arguments[0] == "torch.torch_version":
            time.sleep(0.5)
    elif arguments[0] == "torch.distributed" and "torch" not in sys.modules:
        begun.wait(20)


sys.addaudithook(begin_torch_together)
failed = []
threading.excepthook = lambda found: failed.append(found.exc_value)
warm_up.get_ready()
while "ray.train" not in sys.modules:
    time.sleep(0.001)
importlib.import_module("ray.train.v2._internal.execution.worker_group.worker")
# What Ray unpickles for the worker: the settings of the run and of its process group.
importlib.import_module("train_loop.ray_train.callbacks")
importlib.import_module("train_loop.ray_train.rank_setup")
warm_up.wait_until_ready()
import ray.train
assert not failed, failed
assert hasattr(ray.train, "v2")
assert "train_loop.ray_train.worker" in sys.modules
"""


def test_spare_assigned_during_its_imports_has_complete_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_MEANWHILE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_new_idle_nodes_get_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = list[Mapping[str, int]]()
    idle = dict[str, Mapping[str, float]]()
    monkeypatch.setattr(raylet, "idle_nodes", lambda: idle)
    monkeypatch.setattr(raylet, "own_environment", lambda: "")
    monkeypatch.setattr(raylet, "prestart", lambda counts, *_, **__: requested.append(dict(counts)))
    monkeypatch.setattr(prestart, "_WORTH_IT", 0.0)
    monkeypatch.setattr(prestart, "_IDLE_CHECK_SECONDS", 0.0)
    scaling = ScalingSpec(num_workers=4, resources_per_worker={"CPU": 0.75})
    spares = prestart.Standby(0, elsewhere=(scaling, {"first": 2, "second": 2}))

    def next_request() -> Mapping[str, int]:
        before = len(requested)
        spares.keep()
        wait_for(lambda: len(requested) > before, "a check for idle nodes")
        return requested[-1]

    idle["third"] = {"CPU": 1.0}
    assert next_request() == {}, "expected none: only one of two ranks fits"
    idle["third"] = {"CPU": 2.0}
    assert next_request() == {"third": 2}
    assert next_request() == {}, "expected none: the spares exist"
    idle.clear()
    idle["fourth"] = {"CPU": 2.0}
    assert next_request() == {"fourth": 2}
