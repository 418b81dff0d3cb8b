"""Spare processes that are started before their workers, so that workers do not wait for imports.

Ray starts a process for each actor, and imports take most of the start. A raylet can start processes ahead
(`PrestartWorkers`); the next actor with the same runtime environment gets one of them. The setup hook of that
environment imports a worker's modules while the process waits. The driver requests such processes before its own
preparation. Each worker keeps a spare for a restart of the group.
"""

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import psutil
import ray

from train_loop.plan import lay_out
from train_loop.spec import ScalingSpec
from train_loop.system.gc import no_automatic_collection

log = logging.getLogger(__name__)

_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Variable that Ray sets for `worker_process_setup_hook`, which it supports only for whole jobs."""
_WORTH_IT = 20.0
"""Seconds after its start at which a run starts spares."""
_LOOK_AGAIN = 30.0
"""Seconds between two checks for idle nodes."""
_TAKEN_WITHIN = 2.0
"""Seconds within which Ray assigns a process that it started for an actor."""
_UNTIL, _AHEAD_WITHIN = "TRAINSHED_AHEAD_UNTIL", 30.0
"""Variable with a Unix time; processes that start before it are for workers and import at once. Seconds until it.

A driver also waits this long for nodes with room: after the loss of a head node, they join a few seconds later.
"""
_SUPERVISOR = "ray::JobSupervisor"
"""Ray's name of the process that starts the driver of a submitted job."""
_LOOK_FOR_ROOM = 0.5
"""Seconds between two checks for room."""
_ASKING = 30.0
"""Timeout in seconds of a raylet's answer; without it there is no spare."""
_KEPT_AHEAD, _KEPT = 60, 365 * 86_400
"""Seconds for which nodes keep unused processes: a driver's, and a run's spares (until the run ends)."""
_ACTOR_MODULE = "ray.train.v2._internal.execution.worker_group.worker"
"""Module of Ray Train's worker class."""
_getting_ready: list[threading.Thread] = []
"""Import thread of this process, if it is a prestarted one."""
_logged: set[str] = set()
"""Errors that are already logged: later attempts may fail in the same way."""
_taken = threading.Event()
"""Set once this process belongs to a worker."""

Environment = dict[str, dict[str, str]]


def worker_environment(*, cpus: float) -> Environment:
    """Return the runtime environment of workers that may use a spare; a driver calls it just before its request."""
    return {
        "env_vars": {
            _HOOK: "train_loop.ray_train.prestart.get_ready",
            _UNTIL: f"{time.time() + _AHEAD_WITHIN:.1f}",
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
    return {"env_vars": {_HOOK: "", "OMP_NUM_THREADS": "1"}} if os.environ.get(_HOOK) else None


class Spares:
    """Spare processes on this worker's node, for `count` actors like it, started 20 s after the run.

    An earlier start would lose them to other actors of the workers, and a short run needs none. With `elsewhere`, the
    run's scaling and its number of ranks by node, idle nodes also start spares to replace any one of these nodes.
    New idle nodes are looked up every 30 s.
    """

    def __init__(self, count: int, *, elsewhere: tuple[ScalingSpec, Mapping[str, int]] | None = None) -> None:
        self.count = count
        self._elsewhere = elsewhere
        self._ready: set[str] = set()
        """Idle nodes whose spares are started."""
        self._due = time.monotonic() + _WORTH_IT

    def keep(self) -> None:
        """Start due spares in the background. Call it regularly; it returns at once."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _LOOK_AGAIN
        if self.count:
            _in_background(partial(_start_here, self.count))
            self.count = 0
        if self._elsewhere is not None:
            _in_background(partial(_start_elsewhere, *self._elsewhere, self._ready))


def start_ahead(scaling: ScalingSpec, environment: Environment, *, group: int = 1) -> None:
    """Prestart the processes of a driver's workers in the background, as soon as nodes have room.

    It waits up to 30 s for room. `group` is the Ulysses size. `Placement` will choose the same nodes if the cluster
    does not change. Unused processes exit after 60 s.
    """
    _in_background(partial(_start_ahead, scaling, environment, group))


def _start_here(count: int) -> None:
    raylet = importlib.import_module("train_loop.ray_train.raylet")
    here = {raylet.this_node(): count}
    raylet.prestart(here, raylet.own_environment(), kept_seconds=_KEPT, timeout=_ASKING)


def _start_elsewhere(scaling: ScalingSpec, held: Mapping[str, int], ready: set[str]) -> None:
    raylet = importlib.import_module("train_loop.ray_train.raylet")
    idle = raylet.idle_nodes()
    most = max(held.values())
    wanted = scaling.model_copy(update={"num_workers": most, "placement_strategy": "PACK"})
    ranks = lay_out(wanted, list(idle.values())) or {}
    counts = {list(idle)[place]: len(mine) for place, mine in ranks.items()}
    missing = {node: count for node, count in counts.items() if node not in ready}
    raylet.prestart(missing, raylet.own_environment(), kept_seconds=_KEPT, timeout=_ASKING)
    ready.update(missing)


def _start_ahead(scaling: ScalingSpec, environment: Environment, group: int = 1) -> None:
    raylet = importlib.import_module("train_loop.ray_train.raylet")
    give_up, ranks = time.monotonic() + _AHEAD_WITHIN, None
    while ranks is None:
        _, found = raylet.usable()
        nodes, free = list(found), list(found.values())
        ranks = lay_out(scaling, free, group=group)
        if ranks is None:
            if time.monotonic() > give_up:
                return
            time.sleep(_LOOK_FOR_ROOM)
    counts = {nodes[place]: len(mine) for place, mine in ranks.items()}
    written = raylet.worker_group_environment(environment["env_vars"])
    raylet.prestart(counts, written, kept_seconds=_KEPT_AHEAD, timeout=_ASKING)


def _in_background(start: Callable[[], None]) -> None:
    def run() -> None:
        try:
            # It uses private interfaces of Ray, which may change: workers then start at Ray's own speed.
            start()
        except Exception as error:
            if repr(error) not in _logged:
                _logged.add(repr(error))
                log.warning("spare processes could not be started; workers will wait for imports", exc_info=True)

    threading.Thread(target=run, name="spares", daemon=True).start()


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
    if time.time() > float(os.environ[_UNTIL]) and _is_taken():
        return
    # First the module that Ray imports for the actor in another thread: both then start with the same import lock, and
    # one thread waits for the other. Otherwise this import can fail midway and leave `ray.train` incomplete.
    with no_automatic_collection():
        importlib.import_module(_ACTOR_MODULE)
        importlib.import_module("train_loop.ray_train.worker")


def _is_taken() -> bool:
    """Wait up to 2 s and return whether Ray has assigned this process to an actor."""
    return _taken.wait(_TAKEN_WITHIN) or ray.get_runtime_context().get_actor_id() is not None
