"""Spare processes: imports before their work, and spares for new nodes."""

import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.support.waiting import wait_for
from train_loop.ray_train import prestart, raylet
from train_loop.spec import ScalingSpec

IMPORTS = """
import sys, threading
from train_loop.ray_train import warm_up

others = set()


def note_thread(event, arguments):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        others.add(threading.current_thread().name)


sys.addaudithook(note_thread)
warm_up.get_ready()
assert not others, others
assert "train_loop.ray_train.worker" in sys.modules
assert sys.modules["torch"].distributed.is_available()
"""


def test_hook_imports_in_its_own_thread_and_is_done_when_it_returns() -> None:
    """An import in another thread can meet that of a task, which then gets an incomplete torch."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=False)
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
