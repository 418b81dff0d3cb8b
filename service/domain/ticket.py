"""What admission knows of a job: what it holds, or what it waits for. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from service.domain.job import Job, JobState
from service.domain.reason import Code
from train_loop.plan import DATA_CPUS, needed
from train_loop.spec import ScalingSpec

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Ticket:
    """What admission knows of a job that has not ended."""

    id: str
    project: str
    priority: int
    state: JobState
    scaling: ScalingSpec
    holds: bool
    """Whether the cluster keeps room for it."""
    waits: bool
    """Whether it would start: it is queued, or was paused to make room."""
    sizes: tuple[int, ...] = ()
    """Of an elastic job: the numbers of workers that it can run with, fewest first."""
    since: float = 0.0
    """When its newest attempt began, in Unix seconds."""
    group: int = 1
    """Its Ulysses size: so many workers in a row should share a node."""

    @cached_property
    def needs(self) -> Resources:
        """What the cluster keeps for it: its workers, and a CPU for Ray Data."""
        return add_up([needed(self.scaling), {"CPU": DATA_CPUS}])

    def at(self, workers: int) -> "Ticket":
        """The same with another number of workers."""
        return replace(self, scaling=self.scaling.at(workers))

    @classmethod
    def of(cls, job: Job) -> "Ticket":
        """The ticket of a job."""
        preempted = job.state is JobState.PAUSED and job.wish is not None and job.wish.reason.code is Code.PREEMPTED
        return cls(
            id=job.id,
            project=job.spec.project,
            priority=job.spec.priority,
            state=job.state,
            scaling=_held_size(job) if job.holds_resources else job.size,
            holds=job.holds_resources,
            waits=preempted or job.state is JobState.QUEUED,
            sizes=job.sizes,
            since=job.attempt.started_at if job.attempt else 0.0,
            group=job.spec.strategy.ulysses_size,
        )


def _held_size(job: Job) -> ScalingSpec:
    """What its live attempt has, whatever size it was given since for the next one."""
    attempt = job.attempt
    if attempt is None or not attempt.workers:
        return job.size
    each = dict(attempt.resources or job.size.resources_per_worker)
    return job.size.model_copy(update={"num_workers": attempt.workers, "resources_per_worker": each})


def queue_order(ticket: Ticket) -> tuple[int, str]:
    """Sorts jobs into the order in which they start: priority, then age (ids sort by time)."""
    return (-ticket.priority, ticket.id)


def add_up(parts: Iterable[Resources]) -> Resources:
    """All of them together."""
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total
