"""Who may start: the queue against what the cluster has. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from service.domain.job import Job, JobState
from train_loop.plan import DATA_CPUS, data_starves, needed, too_big
from train_loop.spec import ScalingSpec

Resources = Mapping[str, float]
_NOISE = 1e-9


@dataclass(frozen=True)
class Queue:
    """The cluster's total (None: not reachable), what active jobs hold of it, and how many jobs wait ahead."""

    total: Resources | None = None
    held: Resources = field(default_factory=dict)
    ahead: int = 0


def view_queue(job: Job, live: Iterable[Job], total: Resources | None) -> Queue:
    """The queue as it looks to one job. `live` is every job that has not ended."""
    jobs = [other for other in live if other.id != job.id]
    held = _sum(room(other.spec.scaling) for other in jobs if other.holds_resources)
    waiting = (
        other for other in jobs if other.state is JobState.QUEUED and never_fits(other.spec.scaling, total) is None
    )
    return Queue(total, held, sum(queue_order(other) < queue_order(job) for other in waiting))


def queue_order(job: Job) -> tuple[int, str]:
    """Sorts jobs into the order in which they start: priority, then age (ids sort by time)."""
    return (-job.spec.priority, job.id)


def why_wait(scaling: ScalingSpec, queue: Queue) -> str | None:
    """Why a queued job cannot start now, as a sentence for its owner; None where it can.

    Order is strict: a small job does not pass a big one. Only a job that can never start blocks nobody.
    """
    if queue.total is None:
        return "the cluster is not reachable yet; the job starts once it answers"
    if never := never_fits(scaling, queue.total):
        return never
    if queue.ahead:
        return f"number {queue.ahead + 1} in the queue; jobs start by priority, then by age"
    return _shortage(scaling, queue.total, queue.held)


def never_fits(scaling: ScalingSpec, total: Resources | None) -> str | None:
    """Why the cluster as it is can never hold the job; None where it can, or where nobody knows."""
    if total is None:
        return None
    starves = data_starves(scaling, total)
    return too_big(scaling, total) or (starves.message if starves else None)


def room(scaling: ScalingSpec) -> Resources:
    """What the cluster keeps for an active job: its workers, and a CPU for Ray Data."""
    return _sum([needed(scaling), {"CPU": DATA_CPUS}])


def _shortage(scaling: ScalingSpec, total: Resources, held: Resources) -> str | None:
    short = [
        f"{amount:g} {name} ({held.get(name, 0):g} of the cluster's {total.get(name, 0):g} are taken)"
        for name, amount in room(scaling).items()
        if amount > total.get(name, 0) - held.get(name, 0) + _NOISE
    ]
    return f"next in the queue; waits for {' and '.join(short)}" if short else None


def _sum(parts: Iterable[Resources]) -> Resources:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total
