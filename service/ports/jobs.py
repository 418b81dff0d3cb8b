"""Where jobs are stored, durably."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from service.domain.access import Deed
from service.domain.job import Job, JobState
from service.domain.ticket import Ticket
from service.domain.usage import Usage, UsageByDay

KEPT_SECONDS = 24 * 3600.0
"""For so long an Idempotency-Key stands for its job."""


@dataclass(frozen=True)
class JobQuery:
    """Which jobs to list, newest first, those after the cursor (a job id)."""

    states: tuple[JobState, ...] = ()
    projects: frozenset[str] | None = None
    """None: any."""
    name: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    id_prefix: str | None = None
    """How their ids begin: `job-` and some of what comes behind it, in lower case."""
    after: str | None = None
    limit: int = 50


@dataclass(frozen=True)
class Once:
    """An Idempotency-Key, the SHA-256 of the body that it came with, and whose it is."""

    key: str
    body: str
    scope: str = ""

    @property
    def id(self) -> str:
        """What tells it apart from the keys of others."""
        return f"{self.scope}:{self.key}" if self.scope else self.key


@dataclass(frozen=True)
class NewJob:
    """A job that is to be stored, with its Idempotency-Key and its entries in the audit log."""

    job: Job
    once: Once | None = None
    deeds: tuple[Deed, ...] = ()


@dataclass(frozen=True)
class Lease:
    """Who reconciles a job, and until when nobody else does (Unix seconds)."""

    owner: str
    now: float
    until: float


class JobStore(Protocol):
    """Jobs, durably."""

    def job_of(self, once: Once, *, now: float) -> Job | None:
        """Return the job that a key stands for; None if it stands for none. Raises IdempotencyMismatch."""

    def add(self, new: NewJob) -> bool:
        """Store a job and its key durably, in one transaction; return False if the key stands for another job."""

    def add_all(self, added: Sequence[NewJob], *, now: float) -> bool:
        """Store jobs and their keys durably, all or none; return False if a key stands for another job."""

    def delete(self, job: Job, used: Mapping[date, Usage], deed: Deed | None = None) -> bool:
        """Forget a job of the version that was read, but for its hours of each day (UTC); False: it has changed."""

    def get(self, job_id: str) -> Job | None:
        """The job with this id."""

    def page(self, query: JobQuery) -> list[Job]:
        """The jobs that match, newest first."""

    def used_between(self, since: float, until: float, *, projects: frozenset[str] | None = None) -> list[Job]:
        """The jobs that had an attempt between two moments."""

    def used_by_deleted(self, first: date, last: date, *, projects: frozenset[str] | None = None) -> UsageByDay:
        """What deleted jobs had used from one day to another."""

    def tickets(self) -> list[Ticket]:
        """Every job that holds room in the cluster or waits for some."""

    def queue_mark(self) -> Hashable:
        """Another value whenever `tickets` may answer otherwise; much quicker than that."""

    def lead(self, lease: Lease) -> bool:
        """Whether this owner decides about the queue until the lease ends; nobody else does meanwhile."""

    def active(self) -> list[str]:
        """The jobs that somebody has to look after: not those that wait, are paused, or have ended."""

    def claim(self, job_id: str, lease: Lease) -> Job | None:
        """The job, if nobody else holds it; it is this owner's until the lease ends."""

    def give_up_leases(self, owner: str) -> None:
        """Leave all that this owner holds to others, at once; what it still does with them is discarded."""

    def save(self, job: Job, *, owner: str | None = None, leads: bool = False, deed: Deed | None = None) -> bool:
        """Store a change of the version that was read; False: discarded.

        Where an owner is named, only while it has the job's lease; where it leads, only while it has that one instead.
        """

    def ping(self) -> None:
        """Raise unless the database answers."""
