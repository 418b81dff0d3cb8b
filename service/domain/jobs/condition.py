"""Reasons why the worker group of an attempt makes no progress, from the attempt's events. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

from service.domain.jobs.head_node import HeadNode
from service.domain.jobs.reason import HANG_REMEDY, Code, Reason, storage_remedy
from train_loop.plan import list_ranks
from train_loop.run_dir import STARTED

Event = Mapping[str, object]
_CLEARED_BY: Mapping[str, frozenset[str]] = {
    "progressing": frozenset({"stalled"}),
    "group_started": frozenset({"stalled", "host_silent", "waiting_for_capacity"}),
    "workers_lost": frozenset({"stalled", "host_silent"}),
    **dict.fromkeys(
        STARTED, frozenset({"stalled", "host_silent", "waiting_for_capacity", "moving", "storage_unavailable"})
    ),
    "storage_available": frozenset({"storage_unavailable"}),
    "checkpoint_committed": frozenset({"storage_unavailable"}),
    "results_committed": frozenset({"storage_unavailable"}),
}
"""Conditions that each event clears."""
RESUMES = "; the run resumes from its newest checkpoint"
"""End of the reason of a loss."""


@dataclass
class Conditions:
    """The state that the events of one attempt report, up to the newest event."""

    lost: Reason | None = None
    """Reason of the newest loss of a worker group."""
    left: tuple[str, ...] = ()
    """Lost hosts of that group."""
    draining: dict[str, float] = field(default_factory=dict)
    """Hosts that will be removed, mapped to the time of the notice (Unix seconds)."""
    head: HeadNode | None = None
    """Kubernetes node of the driver, if the event names it."""
    waits_for: str | None = None
    """Cause of the attempt's wait after a request to stop, with the start of the wait."""
    _hosts: dict[int, str] = field(default_factory=dict)
    _active: dict[str, Reason] = field(default_factory=dict)

    @property
    def newest(self) -> Reason | None:
        """Return the newest active condition; None if the events report progress."""
        return next(reversed(self._active.values()), None)

    def read(self, event: Event) -> None:
        """Apply the next event."""
        name = str(event.get("event"))
        ends = _CLEARED_BY.get(name, frozenset())
        if name == "progressing" and "host" in event:
            # Only this host answers again.
            ends = frozenset({_key("host_silent", event)})
        for key in [key for key in self._active if key in ends or key.partition(" ")[0] in ends]:
            del self._active[key]
        self._hosts = hosts_of(event) or self._hosts
        if name == "attempt_started" and event.get("node"):
            self.head = HeadNode(_number(event, "time"), str(event["node"]))
        elif name == "workers_lost":
            self.lost, hosts = loss_of(event), event.get("hosts")
            # The hosts of ranks that hung or were killed have not left.
            has_left = isinstance(hosts, list) and event.get("cause") == "host_lost"
            self.left = tuple(map(str, cast("Sequence[object]", hosts))) if has_left else ()
        elif name == "preemption_notice":
            ranks = (self._hosts.get(rank) for rank in _ranks(event, "ranks"))
            self.draining |= dict.fromkeys(filter(None, ranks), _number(event, "time"))
        elif name == "stopping":
            self.waits_for = f"{event.get('waits_for', 'its end')} since {clock_time(_number(event, 'time'))}"
        elif name == "checkpoint_delayed" and self.waits_for is not None:
            step, why = event.get("step"), event.get("reason")
            self.waits_for = f"its storage, which delays the checkpoint of step {step} ({why})"
        if (build := _CONDITIONS.get(name)) is not None:
            key = _key(name, event)
            self._active.pop(key, None)
            self._active[key] = build(event)


def _key(name: str, event: Event) -> str:
    """Return the key of a condition. Several hosts may be silent, so their keys contain the host."""
    return f"{name} {event.get('host')}" if name == "host_silent" else name


def hosts_of(event: Event) -> dict[int, str] | None:
    """Return the host of each rank if the event names all of them, else None."""
    if event.get("event") == "group_started" and isinstance(event.get("hosts"), dict):
        hosts = cast("Mapping[str, object]", event["hosts"])
        return {int(rank): str(host) for rank, host in hosts.items() if str(rank).isdigit()}
    if event.get("event") in STARTED and isinstance(event.get("workers"), list):
        workers = [one for one in cast("Sequence[object]", event["workers"]) if isinstance(one, dict)]
        return {one["rank"]: str(one["host"]) for one in workers if isinstance(one.get("rank"), int) and "host" in one}
    return None


def loss_of(event: Event) -> Reason | None:
    """Return the reason that a workers_lost event reports; None if it reports none."""
    if "error" not in event:
        return None
    codes = {"host_lost": Code.HOST_LOST, "out_of_memory": Code.OUT_OF_MEMORY, "hung": Code.HUNG}
    if "cause" not in event and "hosts" not in event:
        message = f"workers were lost ({event['error']}){RESUMES}"
        return Reason(Code.WORKERS_LOST, message)
    survivors = f" ({_sentence(event['survivors'])})" if event.get("survivors") else ""
    message = f"{_sentence(event['error'])}{survivors}{RESUMES}"
    code = codes.get(str(event.get("cause")), Code.WORKERS_LOST)
    return Reason(code, message, HANG_REMEDY if code is Code.HUNG else None)


def clock_time(seconds: float) -> str:
    """Format a time as HH:MM:SS UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"


def capacity_reason(missing: str, left: Sequence[str], *, since: float | None = None) -> Reason:
    """Return the reason of a job whose workers no longer fit, with the start of the wait if known (Unix seconds)."""
    begun = f" since {clock_time(since)}" if since else ""
    gone = f"; {' and '.join(left)} left the cluster" if left else ""
    remedy = "restart the node or add another one; an elastic job (num_workers: {min, max}) shrinks automatically"
    return Reason(Code.CAPACITY, f"waits{begun} for {missing}{gone}", remedy)


def _silent(event: Event) -> Reason:
    seconds = _number(event, "seconds")
    message = f"host {event.get('host')} has not answered for {seconds:.0f} s; it is declared lost if it stays silent"
    return Reason(Code.HOST_LOST, message)


def _waiting(event: Event) -> Reason:
    missing, left = event.get("missing"), event.get("left")
    names = [str(host) for host in left] if isinstance(left, list) else []
    return capacity_reason(str(missing or "capacity for its workers"), names, since=_number(event, "since"))


def _stalled(event: Event) -> Reason:
    step, seconds = event.get("step"), _number(event, "seconds")
    where = f"step {step} has" if step is not None else "training has"
    return Reason(Code.STALLED, f"{where} made no progress for {seconds:.0f} s{_who_waits(event)}")


def _who_waits(event: Event) -> str:
    """Return which ranks of a stalled group wait for which, as the end of a sentence."""
    waiting, late, hosts = _ranks(event, "waiting"), _ranks(event, "for"), event.get("hosts")
    on = f" on {', '.join(map(str, hosts))}" if hosts and isinstance(hosts, list) else ""
    if not late:
        return on
    if not waiting:
        return f": {_sentence(event.get('reason', list_ranks(late)))}"
    return f": {list_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for {list_ranks(late)}{on}"


def _moving(event: Event) -> Reason:
    hosts = event.get("hosts")
    names = ", ".join(map(str, hosts)) if isinstance(hosts, list) else "its host"
    return Reason(Code.MOVING, f"moving {list_ranks(_ranks(event, 'ranks'))} away from {names}, which will be removed")


def _storage(event: Event) -> Reason:
    since = f" since {clock_time(_number(event, 'since'))}" if _number(event, "since") else ""
    error = f" ({event['error']})" if event.get("error") else ""
    hosts = event.get("hosts")
    on = f" on {', '.join(map(str, hosts))}" if hosts and isinstance(hosts, list) else ""
    message = f"storage {event.get('root')} is unavailable{on}{since}{error}"
    remedy = storage_remedy(error, otherwise="check that it is mounted and reachable on all hosts")
    return Reason(Code.STORAGE_UNAVAILABLE, message, remedy)


_CONDITIONS = {
    "host_silent": _silent,
    "waiting_for_capacity": _waiting,
    "stalled": _stalled,
    "moving": _moving,
    "storage_unavailable": _storage,
}


def _sentence(text: object) -> str:
    return str(text).strip().rstrip(".;")


def _ranks(event: Event, name: str) -> list[int]:
    ranks = event.get(name)
    return [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []


def _number(event: Event, name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
