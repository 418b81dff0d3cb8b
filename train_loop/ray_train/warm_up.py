"""Imports of a worker's modules in a process that Ray has started ahead: the setup hook of its runtime environment.

`system/ray_env.py` names `get_ready` as a string: this module imports the worker, which imports those environments.
"""

import importlib
import os
import threading
import time

import ray

from train_loop.system.gc import no_automatic_collection
from train_loop.system.ray_env import AHEAD_VARIABLE

_TAKEN_WITHIN = 2.0
"""Seconds within which Ray assigns a process that it started for an actor."""
_ACTOR_MODULES = "ray.train.v2._internal.execution.worker_group.worker", "torch"
"""Modules that another thread imports first once Ray assigns the process: that of Ray Train's worker, and torch."""
_getting_ready: list[threading.Thread] = []
"""Import thread of this process, if it is a prestarted one."""
_taken = threading.Event()
"""Set once this process belongs to a worker."""


def get_ready() -> None:
    """Import a worker's modules in a new process of Ray, unless Ray assigns it to an actor at once.

    A process that a driver has requested imports without this wait.
    """
    _getting_ready.append(threading.Thread(target=_import_unless_taken, name="get-ready", daemon=True))
    _getting_ready[-1].start()


def wait_until_ready() -> None:
    """Wait for the imports that `get_ready` has started in this worker's process, if any.

    Imports in two threads can deadlock; Python then gives one thread a partially initialized module.
    """
    _taken.set()
    for thread in _getting_ready:
        thread.join()


def _import_unless_taken() -> None:
    if time.time() > float(os.environ[AHEAD_VARIABLE]) and _is_taken():
        return
    # One thread then waits for the whole module of the other. An import of a part, as of `torch.distributed`, does not
    # wait for its package: it would fail midway, and leave an incomplete `torch` or `ray.train`.
    with no_automatic_collection():
        for module in (*_ACTOR_MODULES, "train_loop.ray_train.worker"):
            importlib.import_module(module)


def _is_taken() -> bool:
    """Wait up to 2 s and return whether Ray has assigned this process to an actor."""
    return _taken.wait(_TAKEN_WITHIN) or ray.get_runtime_context().get_actor_id() is not None
