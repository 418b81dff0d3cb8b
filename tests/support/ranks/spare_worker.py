"""An actor that may take a spare, and a setup hook that shows from outside when a spare's imports are done.

Processes of Ray import this module while a spare imports in another thread. So it imports nothing that a spare does:
two threads that import the same modules can get incomplete ones.
"""

import os
import sys
import threading
from importlib import import_module
from pathlib import Path

import ray

from train_loop.ray_train import warm_up
from train_loop.system.ray_env import HOOK_VARIABLE, Environment, task_environment, worker_environment

_SLOWEST_IMPORT = "train_loop.ray_train.worker"
_FOLDER_VARIABLE = "TEST_SPARES"


def spare_environment(folder: Path) -> Environment:
    """Return the runtime environment of workers whose spares write their process ids to a folder."""
    variables = worker_environment(cpus=1)["env_vars"]
    return {"env_vars": variables | {HOOK_VARIABLE: f"{__name__}.get_ready", _FOLDER_VARIABLE: str(folder)}}


def get_ready() -> None:
    """Get ready as a job's worker does, and report the end of the imports."""
    warm_up.get_ready()
    threading.Thread(target=_report, daemon=True).start()


def _report() -> None:
    for thread in warm_up._getting_ready:
        thread.join()
    if _SLOWEST_IMPORT in sys.modules:
        Path(os.environ[_FOLDER_VARIABLE], str(os.getpid())).touch()


class Worker:
    """An actor that may take a spare, as Ray Train's workers are."""

    def pid(self) -> int:
        return os.getpid()

    def is_ready(self) -> bool:
        return _SLOWEST_IMPORT in sys.modules

    def threads(self) -> int:
        # A spare has it, and a process that was taken at once has not.
        return int(import_module("torch").get_num_threads())

    def task(self) -> int:
        """Return the process of a separate task."""
        task = ray.remote(num_cpus=0.1, runtime_env=task_environment())(lambda: os.getpid())
        return int(ray.get(task.remote()))

    def request_spares(self) -> None:
        prestart = import_module("train_loop.ray_train.prestart")
        prestart._WORTH_IT = 0.0  # type: ignore[attr-defined]
        spares = prestart.Standby(1)
        spares.keep()
        # Once is enough.
        spares.keep()
