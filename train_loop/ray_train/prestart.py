"""Spare processes that are started before their workers, so that workers do not wait for imports.

Ray starts a process for each actor, and imports take most of the start. A raylet can start processes ahead
(`PrestartWorkers`); the next actor with the same runtime environment gets one of them. The setup hook of that
environment imports a worker's modules while the process waits. The driver requests such processes before its own
preparation. Each worker keeps a spare for a restart of the group.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from train_loop.plan import lay_out
from train_loop.spec import ScalingSpec
from train_loop.system.ray_env import Environment

log = logging.getLogger(__name__)

_WORTH_IT = 20.0
"""Seconds after its start at which a run starts spares."""
_IDLE_CHECK_SECONDS = 30.0
"""Seconds between two checks for idle nodes."""
_ROOM_SECONDS = 30.0
"""Seconds for which a driver waits for nodes with room. After the loss of a head node, they join within seconds."""
_ROOM_CHECK_SECONDS = 0.5
"""Seconds between two checks for room."""
_ANSWER_SECONDS = 30.0
"""Timeout in seconds of a raylet's answer; without it there is no spare."""
_KEPT_AHEAD, _KEPT = 60, 365 * 86_400
"""Seconds for which nodes keep unused processes: a driver's, and a run's spares (until the run ends)."""
_logged: set[str] = set()
"""Errors that are already logged: later attempts may fail in the same way."""


class Standby:
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
        self._due = now + _IDLE_CHECK_SECONDS
        if self.count:
            _in_background(partial(_start_here, self.count))
            self.count = 0
        if self._elsewhere is not None:
            _in_background(partial(_start_elsewhere, *self._elsewhere, self._ready))


def start_ahead(scaling: ScalingSpec, environment: Environment, *, group: int = 1, whole: int = 1) -> None:
    """Prestart the processes of a driver's workers in the background, as soon as nodes have room.

    It waits up to 30 s for room. `group` is the number of peers, and `whole` that of a shard group. `Placement` will
    choose the same nodes if the cluster does not change. Unused processes exit after 60 s.
    """
    _in_background(partial(_start_ahead, scaling, environment, group, whole))


def _start_here(count: int) -> None:
    raylet = importlib.import_module("train_loop.ray_train.raylet")
    here = {raylet.this_node(): count}
    raylet.prestart(here, raylet.own_environment(), kept_seconds=_KEPT, timeout=_ANSWER_SECONDS)


def _start_elsewhere(scaling: ScalingSpec, held: Mapping[str, int], ready: set[str]) -> None:
    raylet = importlib.import_module("train_loop.ray_train.raylet")
    idle = raylet.idle_nodes()
    most = max(held.values())
    wanted = scaling.model_copy(update={"num_workers": most, "placement_strategy": "PACK"})
    ranks = lay_out(wanted, list(idle.values())) or {}
    counts = {list(idle)[place]: len(mine) for place, mine in ranks.items()}
    missing = {node: count for node, count in counts.items() if node not in ready}
    raylet.prestart(missing, raylet.own_environment(), kept_seconds=_KEPT, timeout=_ANSWER_SECONDS)
    ready.update(missing)


def _start_ahead(scaling: ScalingSpec, environment: Environment, group: int = 1, whole: int = 1) -> None:
    raylet = importlib.import_module("train_loop.ray_train.raylet")
    give_up, ranks = time.monotonic() + _ROOM_SECONDS, None
    while ranks is None:
        _, found = raylet.usable()
        nodes, free = list(found), list(found.values())
        ranks = lay_out(scaling, free, group=group, whole=whole)
        if ranks is None:
            if time.monotonic() > give_up:
                return
            time.sleep(_ROOM_CHECK_SECONDS)
    counts = {nodes[place]: len(mine) for place, mine in ranks.items()}
    written = raylet.worker_group_environment(environment["env_vars"])
    raylet.prestart(counts, written, kept_seconds=_KEPT_AHEAD, timeout=_ANSWER_SECONDS)


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
