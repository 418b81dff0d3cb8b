"""Runtime environments of worker processes that Ray may start before their workers, and of their tasks."""

import os
import time
from contextlib import suppress

import psutil

HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Variable that Ray sets for `worker_process_setup_hook`, which it supports only for whole jobs."""
AHEAD_VARIABLE = "TRAINSHED_AHEAD_UNTIL"
"""Variable with a Unix time; processes that start before it are for workers and import at once."""
AHEAD_SECONDS = 30.0
"""Seconds from a driver's request to that time.

A driver also waits this long for nodes with room: after the loss of a head node, they join a few seconds later.
"""
OWN_RAY_VARIABLE = "TRAINSHED_OWN_RAY"
"""Names the private folder of the Ray that this process may start."""
_SUPERVISOR = "ray::JobSupervisor"
"""Ray's name of the process that starts the driver of a submitted job."""

Environment = dict[str, dict[str, str]]


def worker_environment(*, cpus: float) -> Environment:
    """Return the runtime environment of workers that may use a spare; a driver calls it just before its request."""
    return {
        "env_vars": {
            HOOK_VARIABLE: "train_loop.ray_train.warm_up.get_ready",
            AHEAD_VARIABLE: f"{time.time() + AHEAD_SECONDS:.1f}",
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
    """Return a runtime environment with which a worker's tasks do not use its spare; None outside such workers."""
    return {"env_vars": {HOOK_VARIABLE: "", "OMP_NUM_THREADS": "1"}} if os.environ.get(HOOK_VARIABLE) else None
