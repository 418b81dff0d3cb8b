"""The result of an admission pass, and its inputs."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from service.domain.jobs.head_node import HeadNode, lost_node
from service.domain.jobs.reason import Reason
from service.domain.queue.entry import QueueEntry
from train_loop.plan import Capacity


@dataclass(frozen=True)
class Admission:
    """The decisions about the queue."""

    starts: tuple[str, ...] = ()
    """Jobs that start now."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Number of workers of each elastic job that starts."""
    preempts: Mapping[str, str] = field(default_factory=dict)
    """Jobs to preempt, mapped to the job that needs their resources."""
    resizes: Mapping[str, int] = field(default_factory=dict)
    """Elastic jobs to resize, mapped to their new number of workers."""
    waits: Mapping[str, Reason] = field(default_factory=dict)
    """Reasons of the waiting jobs, in queue order."""

    @property
    def has_actions(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self.starts or self.preempts or self.resizes)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Return the queue position of each waiting job, from 1."""
        return {job_id: place for place, job_id in enumerate(self.waits, start=1)}


@dataclass
class QueueSnapshot:
    """The last admission pass and its inputs; it explains why a job waits."""

    admission: Admission = field(default_factory=Admission)
    version: Hashable = None
    entries: Mapping[str, QueueEntry] = field(default_factory=dict)
    cluster: Capacity | None = None
    elastic: bool = False
    waits: bool = False
    silent_since: float | None = None
    """Time since which the cluster does not answer (Unix seconds); None if it answers."""
    head: HeadNode | None = None
    """Kubernetes node of the newest head that has run a driver."""
    unreachable: bool = False
    """True if the cluster has not answered for ten seconds."""

    def silent_seconds(self, now: float) -> float:
        """Return the seconds since which the cluster does not answer; 0 if it answers."""
        return 0.0 if self.silent_since is None else max(now - self.silent_since, 0.0)

    def lost_node(self, now: float) -> HeadNode | None:
        """Return the Kubernetes node of a head that has been silent for minutes, if it is known."""
        return lost_node(self.head, silent_seconds=self.silent_seconds(now))

    def read(self, version: Hashable, entries: Iterable[QueueEntry]) -> None:
        """Store the entries of the queue version `version`."""
        self.version, self.entries = version, {entry.id: entry for entry in entries}
        self.elastic = any(entry.sizes and entry.holds for entry in self.entries.values())
        self.waits = any(entry.waits for entry in self.entries.values())
