"""Fakes with the behaviour of the real adapters: a store in a dict and a cluster that runs what it is told to."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from service.domain.admission import queue_order
from service.domain.decide import Submission
from service.domain.job import Job
from service.errors import ClusterError, IdempotencyMismatch
from service.ports import Findings, JobQuery, Launch, Lease, Once
from train_loop.plan import read_shape
from train_loop.spec import JobSpec, Problem


@dataclass
class MemoryJobStore:
    """Jobs in a dict, under one lock."""

    jobs: dict[str, Job] = field(default_factory=dict)
    keys: dict[str, tuple[Once, str]] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, job: Job, once: Once | None) -> tuple[Job, bool]:
        """Store a job; with a known key, answer the job of that key and False. Raises IdempotencyMismatch."""
        with self.lock:
            if once is not None and (known := self.replay(once)):
                return known, False
            self.jobs[job.id] = job
            if once is not None:
                self.keys[once.key] = (once, job.id)
            return job, True

    def replay(self, once: Once) -> Job | None:
        """The job that a key stands for, if it was used. Raises IdempotencyMismatch."""
        if once.key not in self.keys:
            return None
        first, job_id = self.keys[once.key]
        if first != once:
            raise IdempotencyMismatch(once.key)
        return self.jobs[job_id]

    def get(self, job_id: str) -> Job | None:
        """The job with this id."""
        return self.jobs.get(job_id)

    def page(self, query: JobQuery) -> list[Job]:
        """The jobs that match, newest first."""
        found = sorted((job for job in self.jobs.values() if _matches(job, query)), key=lambda job: job.id)
        return found[::-1][: query.limit]

    def live(self) -> list[Job]:
        """Every job that has not ended, in the order in which they start."""
        return sorted((job for job in self.jobs.values() if not job.state.terminal), key=queue_order)

    def claim(self, job_id: str, lease: Lease) -> Job | None:
        """The job, if nobody else holds it; it is this owner's until the lease ends."""
        with self.lock:
            held = self.leases.get(job_id)
            if job_id not in self.jobs or (held and held.owner != lease.owner and held.until >= lease.now):
                return None
            self.leases[job_id] = lease
            return self.jobs[job_id]

    def save(self, job: Job, *, owner: str | None = None) -> bool:
        """Store a change of the version that was read, as the lease's owner if one is named; False: discarded."""
        with self.lock:
            held = self.leases.get(job.id)
            mine = owner is None or (held is not None and held.owner == owner)
            if not mine or job.id not in self.jobs or self.jobs[job.id].version != job.version:
                return False
            self.jobs[job.id] = replace(job, version=job.version + 1)
            return True

    def ping(self) -> None:
        """It always answers."""


@dataclass
class MemoryCluster:
    """A cluster whose submissions are what a test says they are."""

    total: Mapping[str, float] | None = field(default_factory=lambda: {"CPU": 8.0})
    submissions: dict[str, Submission] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)

    @property
    def reachable(self) -> bool:
        """Whether it answers."""
        return self.total is not None

    def submit(self, launch: Launch) -> None:
        """Start a driver; one that is there already is fine."""
        if not self.reachable:
            raise ClusterError("the cluster does not answer")
        if launch.submission_id not in self.submissions:
            self.submissions[launch.submission_id] = Submission.PENDING
            self.launches.append(launch)

    def status(self, submission_id: str) -> Submission:
        """What became of a driver; UNKNOWN when the cluster does not answer."""
        return self.submissions.get(submission_id, Submission.MISSING) if self.reachable else Submission.UNKNOWN

    def stop(self, submission_id: str) -> None:
        """End a driver now; one that is gone is fine."""
        if self.submissions.get(submission_id, Submission.MISSING).alive:
            self.submissions[submission_id] = Submission.STOPPED

    def capacity(self) -> Mapping[str, float] | None:
        """Resources of all living nodes; None when the cluster does not answer."""
        return self.total

    def dashboard(self, submission_id: str | None) -> str | None:
        """There is none."""
        return None


@dataclass
class MemoryPreflight:
    """Finds the problems that a test put there, and the sizes in a spec's own config."""

    problems: list[Problem] = field(default_factory=list)

    def check(self, spec: JobSpec) -> Findings:
        """The problems that a test put there, and the model's sizes."""
        return Findings(tuple(self.problems), read_shape(spec.model.config) if spec.model.config else None)


def _matches(job: Job, query: JobQuery) -> bool:
    return (
        (not query.states or job.state in query.states)
        and query.project in (None, job.spec.project)
        and query.name in (None, job.spec.name)
        and all(job.spec.labels.get(key) == value for key, value in query.labels)
        and (query.after is None or job.id < query.after)
    )
