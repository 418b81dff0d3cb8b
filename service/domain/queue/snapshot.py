"""The result of an admission pass, and its inputs."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

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

    unreachable: bool = False
    """True if the cluster has not answered for ten seconds."""

    def read(self, version: Hashable, entries: Iterable[QueueEntry]) -> None:
        """Store the entries of the queue version `version`."""
        self.version, self.entries = version, {entry.id: entry for entry in entries}
        self.elastic = any(entry.sizes and entry.holds for entry in self.entries.values())
        self.waits = any(entry.waits for entry in self.entries.values())
