"""A process kept ready beside every worker, so that a group that is started again does not wait for imports.

Ray starts a process for each actor, and most of a restart is what that process imports. A raylet can be told to start
processes ahead (`PrestartWorkers`); the next actor with the same runtime environment gets one. The set-up hook of that
environment has the process import, while it waits, what a worker needs.
"""

import importlib
import logging
import os
import threading
import time

import ray

log = logging.getLogger(__name__)

_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""What Ray sets for `worker_process_setup_hook`, which it takes for whole jobs alone."""
_WORTH_IT = 20.0
"""Seconds after which a run has spares."""
_TAKEN_WITHIN = 2.0
"""Seconds within which a process that was started for an actor is given to it."""
_ASKING = 30.0
"""Seconds in which a raylet answers, or there is no spare."""


Environment = dict[str, dict[str, str]]


def worker_environment(*, cpus: float) -> Environment:
    """The runtime environment of workers that may take a spare."""
    return {
        "env_vars": {
            _HOOK: "train_loop.spare.get_ready",
            # As Ray does it, but that it comes to a spare after torch has read it.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(int(cpus), 1)),
            # Who asks CUDA for devices fixes which ones a process sees, and a spare hears of its own when it is taken.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
    }


def task_environment() -> Environment | None:
    """That of tasks which such a worker starts: another one, as a task would take a spare as well; None elsewhere."""
    return {"env_vars": {_HOOK: "", "OMP_NUM_THREADS": "1"}} if os.environ.get(_HOOK) else None


class Spares:
    """Has processes started on this worker's node, for `count` actors like this one, once a run is worth it.

    That is not at its start: what else its workers start would take them, and a short run needs none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._begun = time.monotonic()

    def keep(self) -> None:
        """To be called now and then; returns at once."""
        if self._count and time.monotonic() - self._begun >= _WORTH_IT:
            threading.Thread(target=_start, args=(self._count,), name="spares", daemon=True).start()
            self._count = 0


def _start(count: int) -> None:
    try:
        # What it stands on is private to Ray, and may be gone one day: a restart is then as slow as Ray's own.
        importlib.import_module("train_loop.raylet").prestart(count, seconds=_ASKING)
    except Exception:
        log.warning("no spare processes: a restart will wait for imports", exc_info=True)


def get_ready() -> None:
    """In a process that Ray has just started: if it is not given to an actor at once, it is a spare, and gets ready."""
    threading.Thread(target=_import_unless_taken, name="get-ready", daemon=True).start()


def _import_unless_taken() -> None:
    time.sleep(_TAKEN_WITHIN)
    if ray.get_runtime_context().get_actor_id() is None:
        importlib.import_module("train_loop.rank")
