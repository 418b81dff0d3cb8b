"""Processes that are started before their workers, so that these do not wait for imports.

Ray starts a process for each actor, and most of a start is what that process imports. A raylet can be told to start
processes ahead (`PrestartWorkers`); the next actor with the same runtime environment gets one. The set-up hook of that
environment has the process import, while it waits, what a worker needs. The driver has them started before it gets
ready itself, and each worker keeps one beside it for when the group is started again.
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
"""What Ray sets for `worker_process_setup_hook`, which it takes for whole jobs alone."""
_WORTH_IT = 20.0
"""Seconds after which a run has spares."""
_LOOK_AGAIN = 30.0
"""Seconds after which it looks for idle nodes again."""
_TAKEN_WITHIN = 2.0
"""Seconds within which a process that was started for an actor is given to it."""
_UNTIL, _AHEAD_WITHIN = "TRAINSHED_AHEAD_UNTIL", 30.0
"""Until when (Unix time) a process that starts is for a worker, so that it need not find out; seconds from a driver.

For so long a driver also waits for nodes with room: after the loss of a head, they join some seconds after it started.
"""
_SUPERVISOR = "ray::JobSupervisor"
"""What Ray calls the process that starts the driver of a submitted job."""
_LOOK_FOR_ROOM = 0.5
"""Seconds between two looks."""
_ASKING = 30.0
"""Seconds in which a raylet answers, or there is no spare."""
_KEPT_AHEAD, _KEPT = 60, 365 * 86_400
"""Seconds for which nodes keep what nobody has taken: what a driver asked for, and a run's spares (until it ends)."""
_ACTOR_MODULE = "ray.train.v2._internal.execution.worker_group.worker"
"""Where Ray Train has the class of its workers."""
_getting_ready: list[threading.Thread] = []
"""The thread that imports in this process, if it is one that gets ready."""
_logged: set[str] = set()
"""Errors that were logged once: every later attempt may fail in the same way."""
_taken = threading.Event()
"""Set once this process belongs to a worker."""

Environment = dict[str, dict[str, str]]


def worker_environment(*, cpus: float) -> Environment:
    """The runtime environment of workers that may take a spare, of a driver that asks for them now."""
    return {
        "env_vars": {
            _HOOK: "train_loop.ray_train.prestart.get_ready",
            _UNTIL: f"{time.time() + _AHEAD_WITHIN:.1f}",
            # As Ray does it, but that it comes to a spare after torch has read it.
            "OMP_NUM_THREADS": threads_of_operator() or str(max(int(cpus), 1)),
            # Who asks CUDA for devices fixes which ones a process sees, and a spare hears of its own when it is taken.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
    }


def threads_of_operator() -> str | None:
    """Return OMP_NUM_THREADS as the operator has set it for this node; None if nobody has.

    Ray's supervisor of a job sets it to 1 for itself and so for its driver. What the supervisor was started with tells.
    """
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            if parent.cmdline()[:1] == [_SUPERVISOR]:
                return parent.environ().get("OMP_NUM_THREADS")
    return os.environ.get("OMP_NUM_THREADS")


def task_environment() -> Environment | None:
    """That of tasks which such a worker starts: another one, as a task would take a spare as well; None elsewhere."""
    return {"env_vars": {_HOOK: "", "OMP_NUM_THREADS": "1"}} if os.environ.get(_HOOK) else None


class Spares:
    """Has processes started on this worker's node, for `count` actors like this one, once a run is worth it.

    That is not at its start: what else its workers start would take them, and a short run needs none. With `elsewhere`,
    the run's size and how many of its ranks each node has, idle nodes get ready to replace any one of these nodes.
    It checks for new idle nodes every 30 s.
    """

    def __init__(self, count: int, *, elsewhere: tuple[ScalingSpec, Mapping[str, int]] | None = None) -> None:
        self.count = count
        self._elsewhere = elsewhere
        self._ready: set[str] = set()
        """The idle nodes that have started theirs."""
        self._due = time.monotonic() + _WORTH_IT

    def keep(self) -> None:
        """To be called now and then; returns at once."""
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
    """Have the processes of a driver's workers started as soon as nodes have room for them; returns at once.

    It waits 30 s for room. `group` is the Ulysses size. The nodes are those that `Placement` will choose if nothing
    changes until then; a process that no worker takes ends by itself.
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
            # What it stands on is private to Ray, and may be gone one day: a start is then as slow as Ray's own.
            start()
        except Exception as error:
            if repr(error) not in _logged:
                _logged.add(repr(error))
                log.warning("no spare processes: workers will wait for imports", exc_info=True)

    threading.Thread(target=run, name="spares", daemon=True).start()


def get_ready() -> None:
    """In a process that Ray has just started: if it is not given to an actor at once, it is a spare, and gets ready.

    One that a driver has asked for need not wait to know.
    """
    _getting_ready.append(threading.Thread(target=_import_unless_taken, name="get-ready", daemon=True))
    _getting_ready[-1].start()


def wait_until_ready() -> None:
    """In the process of a worker: wait for the imports that `get_ready` has begun, if any.

    Imports of two threads can wait for each other. Python then gives one of them a module that is half done.
    """
    _taken.set()
    for thread in _getting_ready:
        thread.join()


def _import_unless_taken() -> None:
    if time.time() > float(os.environ[_UNTIL]) and _is_taken():
        return
    # First the module that Ray imports for the actor in another thread: both then begin with the same lock, and one
    # thread waits for the other. Otherwise this import can fail half-way and leave `ray.train` incomplete.
    with no_automatic_collection():
        importlib.import_module(_ACTOR_MODULE)
        importlib.import_module("train_loop.ray_train.worker")


def _is_taken() -> bool:
    """Return whether Ray gives this process to an actor at once; it takes some seconds to know."""
    return _taken.wait(_TAKEN_WITHIN) or ray.get_runtime_context().get_actor_id() is not None
