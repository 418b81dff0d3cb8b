"""Port to the durable job store."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from service.domain.access.roles import AuditEntry
from service.domain.jobs.job import Job, JobState
from service.domain.jobs.usage import Usage, UsageByDay
from service.domain.queue.entry import QueueEntry

IDEMPOTENCY_TTL = 24 * 3600.0
"""Seconds for which an Idempotency-Key refers to its job."""


@dataclass(frozen=True)
class JobQuery:
    """A filter of jobs, listed newest first, after the cursor `after` (a job id)."""

    states: tuple[JobState, ...] = ()
    projects: frozenset[str] | None = None
    """Projects of the jobs; None means all projects."""
    name: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    id_prefix: str | None = None
    """Prefix of the job ids: `job-` and the first characters after it, in lower case."""
    after: str | None = None
    limit: int = 50


@dataclass(frozen=True)
class IdempotencyKey:
    """An Idempotency-Key, the SHA-256 of its request body, and the scope of its caller."""

    key: str
    body: str
    scope: str = ""

    @property
    def id(self) -> str:
        """Return the key with its scope, which is unique among all callers."""
        return f"{self.scope}:{self.key}" if self.scope else self.key


@dataclass(frozen=True)
class NewJob:
    """A job to store, with its Idempotency-Key and its audit log entries."""

    job: Job
    key: IdempotencyKey | None = None
    audit_entries: tuple[AuditEntry, ...] = ()


@dataclass(frozen=True)
class Lease:
    """An exclusive claim of `owner`, e.g. to reconcile a job, until a time. Times are Unix seconds."""

    owner: str
    now: float
    until: float


class JobStore(Protocol):
    """Durable store of jobs."""

    def job_of(self, key: IdempotencyKey, *, now: float) -> Job | None:
        """Return the job of a key; None if it has none. Raises IdempotencyMismatch if the body differs."""

    def add(self, new: NewJob) -> bool:
        """Store a job and its key durably, in one transaction. Return False if the key refers to another job."""

    def add_all(self, added: Sequence[NewJob], *, now: float) -> bool:
        """Store jobs and their keys durably, all or none. Return False if a key refers to another job."""

    def delete(self, job: Job, used: Mapping[date, Usage], entry: AuditEntry | None = None) -> bool:
        """Delete a job, but keep its usage of each day (UTC). Return False if the job changed since it was read."""

    def get(self, job_id: str) -> Job | None:
        """Return the job with this id; None if there is none."""

    def page(self, query: JobQuery) -> list[Job]:
        """Return the matching jobs, newest first."""

    def used_between(self, since: float, until: float, *, projects: frozenset[str] | None = None) -> list[Job]:
        """Return the jobs that started before `until` and had not finished at `since` (Unix seconds)."""

    def used_by_deleted(self, first: date, last: date, *, projects: frozenset[str] | None = None) -> UsageByDay:
        """Return the usage of deleted jobs from day `first` to day `last`."""

    def queue_entries(self) -> list[QueueEntry]:
        """Return the entries of all jobs that hold resources of the cluster or wait for them."""

    def queue_version(self) -> Hashable:
        """Return a value that changes whenever the result of `queue_entries` may change. Much faster than that."""

    def lead(self, lease: Lease) -> bool:
        """Take or renew the queue's lease: only its owner decides about the queue. Return whether this owner has it."""

    def active(self) -> list[str]:
        """Return the ids of the jobs to reconcile: all except waiting, paused and finished jobs."""

    def claim(self, job_id: str, lease: Lease) -> Job | None:
        """Lease a job to this owner until the lease ends, and return it; None if another owner has it."""

    def give_up_leases(self, owner: str) -> None:
        """Release all leases of this owner at once. The store discards its later changes under them."""

    def save(self, job: Job, *, owner: str | None = None, leads: bool = False, entry: AuditEntry | None = None) -> bool:
        """Store a change to the version that was read. Return False if the change was discarded.

        With `owner`, the owner must have the job's lease; with `leads`, the queue's lease instead.
        """

    def ping(self) -> None:
        """Raise an error unless the database answers."""
