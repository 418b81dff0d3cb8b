"""Runtime environments of worker processes that Ray may start before their workers, and of their tasks."""

import os
from contextlib import suppress

import psutil

HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Variable that Ray sets for `worker_process_setup_hook`, which it supports only for whole jobs."""
OWN_RAY_VARIABLE = "TRAINSHED_OWN_RAY"
"""Names the private folder of the Ray that this process may start."""
_SUPERVISOR = "ray::JobSupervisor"
"""Ray's name of the process that starts the driver of a submitted job."""

Environment = dict[str, dict[str, str]]


def worker_environment(*, cpus: float) -> Environment:
    """Return the runtime environment of workers that may use a spare."""
    return {
        "env_vars": {
            HOOK_VARIABLE: "train_loop.ray_train.warm_up.get_ready",
            # The same value as Ray's, which would reach a spare only after torch has read the variable.
            "OMP_NUM_THREADS": threads_of_operator() or str(max(int(cpus), 1)),
            # A CUDA query would fix a process's visible devices, and a spare gets its devices only when it is assigned.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
    }


def threads_of_operator() -> str | None:
    """Return the operator's OMP_NUM_THREADS on this node; None if it is not set.

    Ray's job supervisor sets the variable to 1 for itself and its driver, but its initial environment has the value.
    """
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            if parent.cmdline()[:1] == [_SUPERVISOR]:
                return parent.environ().get("OMP_NUM_THREADS")
    return os.environ.get("OMP_NUM_THREADS")


def task_environment() -> Environment | None:
    """Return a runtime environment with which a worker's tasks and actors use no spare; None outside such workers."""
    return {"env_vars": {HOOK_VARIABLE: "", "OMP_NUM_THREADS": "1"}} if os.environ.get(HOOK_VARIABLE) else None
