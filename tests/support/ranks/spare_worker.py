"""An actor that may take a spare, and a setup hook that shows from outside when a spare's imports are done."""

import os
import sys
from importlib import import_module
from pathlib import Path

import ray

from train_loop.data.stream.local import StreamPlan
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
    Path(os.environ[_FOLDER_VARIABLE], str(os.getpid())).touch()


class Worker:
    """An actor that may take a spare, as Ray Train's workers are."""

    def pid(self) -> int:
        return os.getpid()

    def is_ready(self) -> bool:
        return _SLOWEST_IMPORT in sys.modules

    def threads(self) -> int:
        return int(import_module("torch").get_num_threads())

    def task(self) -> int:
        """Return the process of a separate task."""
        task = ray.remote(num_cpus=0.1, runtime_env=task_environment())(lambda: os.getpid())
        return int(ray.get(task.remote()))

    def read(self, plan: StreamPlan) -> list[int]:
        """Return the samples of all steps, read by Ray Data."""
        ray_data = import_module("train_loop.data.stream.ray_data")
        (split,) = ray_data.open_splits(plan, plan.start, plan.steps)
        return [sample for rows in ray_data.by_step(split, plan.order.per_rank) for sample in rows.samples.tolist()]

    def request_spares(self) -> None:
        prestart = import_module("train_loop.ray_train.prestart")
        prestart._WORTH_IT = 0.0  # type: ignore[attr-defined]
        spares = prestart.Standby(1)
        spares.keep()
        # Once is enough.
        spares.keep()
