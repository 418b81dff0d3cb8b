"""Imports of a spare process while Ray gives it to a worker."""

import subprocess
import sys

TAKEN_MEANWHILE = """
import importlib, os, sys, threading, time
os.environ["TRAINSHED_AHEAD_UNTIL"] = str(time.time() + 600)
from train_loop import spare

failed = []
threading.excepthook = lambda found: failed.append(found.exc_value)
spare.get_ready()
while "ray.train" not in sys.modules:
    time.sleep(0.001)
importlib.import_module("ray.train.v2._internal.execution.worker_group.worker")
spare.wait_until_ready()
import ray.train
assert not failed, failed
assert hasattr(ray.train, "v2")
assert "train_loop.rank" in sys.modules
"""


def test_spare_that_is_taken_during_its_imports_has_whole_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_MEANWHILE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
