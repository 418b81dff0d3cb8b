"""Queue entries: the resources that jobs hold or wait for. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from service.domain.jobs.job import Job, JobState, reserve_memory
from service.domain.jobs.reason import Code
from service.domain.queue.resources import Resources, add_up
from train_loop.plan import DATA_CPUS, needed
from train_loop.spec import MEMORY, ScalingSpec


@dataclass(frozen=True)
class QueueEntry:
    """The queue entry of a job that has not ended: its input to admission."""

    id: str
    project: str
    priority: int
    state: JobState
    scaling: ScalingSpec
    holds: bool
    """True if the cluster reserves resources for the job."""
    waits: bool
    """True if the job is to start: it is queued, or was preempted."""
    sizes: tuple[int, ...] = ()
    """Possible numbers of workers of an elastic job, smallest first; empty if the size is fixed."""
    since: float = 0.0
    """Start of the newest attempt (Unix seconds)."""
    group: int = 1
    """Number of peers: this many consecutive workers should share a node."""
    memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes of host memory that each worker reserves, by number of workers; empty if the cluster limits no worker."""

    @cached_property
    def needs(self) -> Resources:
        """Return the resources that the cluster reserves: the workers, and one CPU for Ray Data."""
        return add_up([needed(self.scaling), {"CPU": DATA_CPUS}])

    def at(self, workers: int) -> "QueueEntry":
        """Return the entry with another number of workers."""
        return replace(self, scaling=reserve_memory(self.scaling.at(workers), self.memory))

    def without_memory(self) -> "QueueEntry":
        """Return the entry for a cluster that does not count memory, as after a change from embedded Ray to another."""
        if not self.memory:
            return self
        resources = {name: amount for name, amount in self.scaling.resources_per_worker.items() if name != MEMORY}
        return replace(self, memory={}, scaling=self.scaling.model_copy(update={"resources_per_worker": resources}))

    def named_to(self, project: str) -> str:
        """Return the job's name in the reasons of a project's jobs. The ids of other projects' jobs are not shown."""
        return self.id if self.project == project else "a job of another project"

    @classmethod
    def of(cls, job: Job) -> "QueueEntry":
        """Build the entry of a job."""
        preempted = (
            job.state is JobState.PAUSED
            and job.stop_request is not None
            and job.stop_request.reason.code is Code.PREEMPTED
        )
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
            group=job.spec.strategy.peers,
            memory=job.memory,
        )


def _held_size(job: Job) -> ScalingSpec:
    """Return the size of the live attempt, even if the next attempt gets another size."""
    attempt = job.attempt
    if attempt is None or not attempt.workers:
        return job.size
    each = dict(attempt.resources or job.size.resources_per_worker)
    return job.size.model_copy(update={"num_workers": attempt.workers, "resources_per_worker": each})


def queue_order(entry: QueueEntry) -> tuple[int, str]:
    """Return the sort key of the start order: priority, then age (ids sort by time)."""
    return (-entry.priority, entry.id)


def named_together(entries: Iterable[QueueEntry], project: str) -> str:
    """Return the names of several jobs in the reasons of a project's jobs."""
    entries = list(entries)
    own = [entry.id for entry in entries if entry.project == project]
    others = len(entries) - len(own)
    return ", ".join([*own, *([f"{others} of other projects"] if others else [])])
