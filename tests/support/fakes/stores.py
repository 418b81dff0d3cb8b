"""Fakes that behave like the real adapters: stores in dicts, and a cluster that a test controls."""

import math
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from service.domain.access.oidc_claims import Claims
from service.domain.access.roles import AuditEntry, Key
from service.domain.jobs.job import ACTIVE, Job, JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.usage import Usage, UsageByDay, merge_usage
from service.domain.queue.entry import QueueEntry
from service.errors import ClusterError, IdempotencyMismatch, Unauthorized
from service.ports import (
    IDEMPOTENCY_TTL,
    Cancellation,
    Counts,
    IdempotencyKey,
    JobQuery,
    Lease,
    NewJob,
    Node,
    PreflightReport,
    SubmitRequest,
    WebhookCounts,
)
from train_loop.model.folder import model_shape
from train_loop.plan import Capacity, LargestRead, ModelShape, NodeRoom, Preview, SampleCount
from train_loop.run_dir import Parent
from train_loop.spec import AnyJobSpec, LoraSpec, Problem

_QUEUE = "queue"


@dataclass
class MemoryJobStore:
    """A JobStore with its jobs in a dict, under one lock."""

    jobs: dict[str, Job] = field(default_factory=dict)
    keys: dict[str, tuple[IdempotencyKey, float, str]] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    deleted: UsageByDay = field(default_factory=dict)
    audit_log: list[AuditEntry] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def job_of(self, key: IdempotencyKey, *, now: float) -> Job | None:
        """Return the job of a key; None if it has none. Raises IdempotencyMismatch if the body differs."""
        with self.lock:
            first, since, job_id = self.keys.get(key.id, (key, -math.inf, ""))
            if now - since > IDEMPOTENCY_TTL:
                return None
            if first != key:
                raise IdempotencyMismatch(key.key)
            return self.jobs[job_id]

    def add(self, new: NewJob) -> bool:
        """Store a job and its key. Return False if the key refers to another job."""
        return self.add_all([new], now=new.job.created_at)

    def add_all(self, added: Sequence[NewJob], *, now: float) -> bool:
        """Store jobs and their keys, all or none. Return False if a key refers to another job."""
        with self.lock:
            keys = {new.key.id: (new.key, now, new.job.id) for new in added if new.key is not None}
            taken = {key for key in keys if key in self.keys and now - self.keys[key][1] <= IDEMPOTENCY_TTL}
            if taken or len(keys) < sum(new.key is not None for new in added):
                return False
            self.keys |= keys
            self.jobs |= {new.job.id: new.job for new in added}
            for new in added:
                self._record(*new.audit_entries)
            return True

    def delete(self, job: Job, used: Mapping[date, Usage], entry: AuditEntry | None = None) -> bool:
        """Delete a job, but keep its usage of each day (UTC). Return False if the job changed since it was read."""
        with self.lock:
            if self.jobs.get(job.id) != job:
                return False
            del self.jobs[job.id]
            self.deleted = merge_usage(self.deleted, {(job.spec.project, day): hours for day, hours in used.items()})
            self.keys = {key: value for key, value in self.keys.items() if value[2] != job.id}
            self._record(entry)
            return True

    def get(self, job_id: str) -> Job | None:
        """Return the job with this id; None if there is none."""
        return self.jobs.get(job_id)

    def page(self, query: JobQuery) -> list[Job]:
        """Return the matching jobs, newest first."""
        found = sorted((job for job in self.jobs.values() if _matches(job, query)), key=lambda job: job.id)
        return found[::-1][: query.limit]

    def used_between(self, since: float, until: float, *, projects: frozenset[str] | None = None) -> list[Job]:
        """Return the jobs that started before `until` and had not finished at `since` (Unix seconds)."""
        return [
            job
            for job in self.jobs.values()
            if (projects is None or job.spec.project in projects)
            and (job.started_at or until) < until
            and (job.finished_at is None or job.finished_at > since)
        ]

    def used_by_deleted(self, first: date, last: date, *, projects: frozenset[str] | None = None) -> UsageByDay:
        """Return the usage of deleted jobs from day `first` to day `last`."""
        found = (
            self.deleted.items() if projects is None else [one for one in self.deleted.items() if one[0][0] in projects]
        )
        return {key: used for key, used in found if first <= key[1] <= last}

    def queue_entries(self) -> list[QueueEntry]:
        """Return the entries of all jobs that hold resources of the cluster or wait for them."""
        with self.lock:
            return [entry for entry in map(QueueEntry.of, self.jobs.values()) if entry.holds or entry.waits]

    def queue_version(self) -> Hashable:
        """Return a value that changes whenever the result of `queue_entries` may change."""
        with self.lock:
            return tuple((job.id, job.version) for job in self.jobs.values())

    def lead(self, lease: Lease) -> bool:
        """Take or renew the queue's lease: only its owner decides about the queue. Return whether this owner has it."""
        with self.lock:
            return self._take(_QUEUE, lease)

    def active(self) -> list[str]:
        """Return the ids of the jobs to reconcile: all except waiting, paused and finished jobs."""
        with self.lock:
            return [job.id for job in self.jobs.values() if job.state in ACTIVE]

    def counts(self) -> Counts:
        """Return the number of jobs by state and project."""
        with self.lock:
            return Counter((job.state, job.spec.project) for job in self.jobs.values())

    def queued_since(self) -> Mapping[str, float]:
        """Return the time (Unix seconds) since which the longest-waiting job has been queued, by project."""
        with self.lock:
            queued = [job for job in self.jobs.values() if job.state is JobState.QUEUED]
        since = {job.id: job.times.get(JobState.QUEUED, job.created_at) for job in queued}
        return {
            project: min(since[job.id] for job in queued if job.spec.project == project)
            for project in {job.spec.project for job in queued}
        }

    def webhooks(self) -> WebhookCounts:
        """Return zeros: this store holds no webhooks."""
        return WebhookCounts()

    def claim(self, job_id: str, lease: Lease) -> Job | None:
        """Lease a job to this owner until the lease ends, and return it; None if another owner has it."""
        with self.lock:
            return self.jobs[job_id] if job_id in self.jobs and self._take(job_id, lease) else None

    def give_up_leases(self, owner: str) -> None:
        """Release all leases of this owner."""
        with self.lock:
            self.leases = {name: lease for name, lease in self.leases.items() if lease.owner != owner}

    def save(self, job: Job, *, owner: str | None = None, leads: bool = False, entry: AuditEntry | None = None) -> bool:
        """Store a change to the version that was read. Return False if the change was discarded.

        With `owner`, the owner must have the job's lease; with `leads`, the queue's lease instead.
        """
        with self.lock:
            mine = owner is None or self._owns(_QUEUE if leads else job.id, owner)
            if not mine or job.id not in self.jobs or self.jobs[job.id].version != job.version:
                return False
            self.jobs[job.id] = replace(job, version=job.version + 1)
            self._record(entry)
            return True

    def _take(self, name: str, lease: Lease) -> bool:
        held = self.leases.get(name)
        if held is not None and held.owner != lease.owner and held.until >= lease.now:
            return False
        self.leases[name] = lease
        return True

    def _owns(self, name: str, owner: str) -> bool:
        held = self.leases.get(name)
        return held is not None and held.owner == owner

    def ping(self) -> None:
        """Do nothing: this store always answers."""

    def _record(self, *done: AuditEntry | None) -> None:
        self.audit_log += filter(None, done)


@dataclass
class MemoryKeyStore:
    """A KeyStore with its keys in a dict. The job store shares its audit log."""

    done: list[AuditEntry] = field(default_factory=list)
    keys: dict[str, Key] = field(default_factory=dict)

    def add(self, key: Key, entry: AuditEntry) -> None:
        """Store a new key."""
        self.keys[key.id] = key
        self.record(entry)

    def get(self, key_id: str) -> Key | None:
        """Return the key with this id; None if there is none."""
        return self.keys.get(key_id)

    def all(self) -> list[Key]:
        """Return all keys, also expired and revoked ones, newest first."""
        return sorted(self.keys.values(), key=lambda key: key.id, reverse=True)

    def revoke(self, key_id: str, *, now: float, entry: AuditEntry) -> bool:
        """Revoke a key. Return False if it was revoked before; the first time of revocation stays."""
        if key_id not in self.keys or self.keys[key_id].revoked_at is not None:
            return False
        self.keys[key_id] = replace(self.keys[key_id], revoked_at=now)
        self.record(entry)
        return True

    def record(self, entry: AuditEntry) -> None:
        """Store the audit entry of a change that is not in the store."""
        self.done.append(entry)

    def entries(
        self, projects: frozenset[str] | None, *, after: int | None, limit: int
    ) -> list[tuple[int, AuditEntry]]:
        """Return the audit entries of these projects (None: of all), newest first, with numbers below `after`."""
        found = reversed(list(enumerate(self.done, 1)))
        wanted = ((n, entry) for n, entry in found if projects is None or entry.project in projects)
        return [(n, entry) for n, entry in wanted if after is None or n < after][:limit]


@dataclass
class MemoryTokens:
    """A TokenVerifier with a fixed set of valid tokens."""

    known: dict[str, Claims] = field(default_factory=dict)

    def verify(self, token: str) -> Claims:
        """Return the claims of a token. Raises Unauthorized if it is unknown."""
        if token not in self.known:
            raise Unauthorized("invalid token (it has expired)")
        return self.known[token]


@dataclass
class MemoryCluster:
    """A cluster whose submissions have the statuses that a test sets."""

    total: Mapping[str, float] | None = field(default_factory=lambda: {"CPU": 8.0})
    nodes_total: tuple[Mapping[str, float], ...] = ()
    known_nodes: list[Node] = field(default_factory=list)
    memory: int | None = 1 << 50
    """Host memory of each node in bytes."""
    limited: bool = False
    """True if the nodes limit workers to the memory that they reserve, as embedded Ray does."""
    submissions: dict[str, SubmissionStatus] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    launches: list[SubmitRequest] = field(default_factory=list)

    @property
    def reachable(self) -> bool:
        """Return whether the cluster answers."""
        return self.total is not None

    def submit(self, launch: SubmitRequest) -> None:
        """Start a driver. Do nothing if a driver already exists under this id."""
        if not self.reachable:
            raise ClusterError("the cluster does not answer")
        if launch.submission_id not in self.submissions:
            self.submissions[launch.submission_id] = SubmissionStatus.PENDING
            self.launches.append(launch)

    def status(self, submission_id: str) -> SubmissionStatus:
        """Return the status of a driver; UNKNOWN if the cluster does not answer."""
        return (
            self.submissions.get(submission_id, SubmissionStatus.MISSING)
            if self.reachable
            else SubmissionStatus.UNKNOWN
        )

    def end_of(self, submission_id: str) -> str | None:
        """Return how a driver ended, if a test set it."""
        return self.ends.get(submission_id)

    def stop(self, submission_id: str) -> None:
        """Stop a driver now. Do nothing if it does not exist or has ended."""
        if self.submissions.get(submission_id, SubmissionStatus.MISSING).alive:
            self.submissions[submission_id] = SubmissionStatus.STOPPED

    def capacity(self) -> Capacity | None:
        """Return the resources of all live nodes; None if the cluster does not answer."""
        return None if self.total is None else Capacity(self.total, self.nodes_total)

    def rooms(self) -> tuple[NodeRoom, ...]:
        """Return the live nodes, or one that has all resources, with the memory that a test set."""
        nodes = self.nodes_total or ((self.total,) if self.total is not None else ())
        devices = ((1 << 50,) * int(node.get("GPU", 0)) for node in nodes)
        return tuple(
            NodeRoom(node, self.memory, gpus, limited=self.limited) for node, gpus in zip(nodes, devices, strict=True)
        )

    def nodes(self) -> list[Node] | None:
        """Return the nodes that a test set; None if the cluster does not answer."""
        return self.known_nodes if self.reachable else None

    def dashboard(self, submission_id: str | None) -> str | None:
        """Return None: this cluster has no dashboard."""
        return None


@dataclass
class MemoryPreflight:
    """A Preflight that returns the problems and samples that a test sets, and the sizes in a spec's own config."""

    problems: list[Problem] = field(default_factory=list)
    count: SampleCount | None = None
    preview: tuple[Preview, ...] = ()
    largest: LargestRead | None = None
    shape: ModelShape | None = None
    """The sizes of models in folders."""
    lora: LoraSpec | None = None
    notes: tuple[str, ...] = ()
    in_order: dict[str, PreflightReport] = field(default_factory=dict)
    starting: str | None = None

    def check(
        self, spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        """Return the problems that a test set, and the model's sizes."""
        shape = model_shape(spec.model) if spec.model.path is None else self.shape
        code = (spec.code.sha256 or "c" * 64) if spec.code else None
        known = (shape, self.preview, self.count, self.largest, code, self.lora, self.notes)
        found = PreflightReport(tuple(self.problems), *known)
        if not found.problems:
            self.in_order[spec.model_dump_json()] = found
        return found

    def trouble(self) -> str | None:
        """Return the reason that a test set; None if there is none."""
        return self.starting

    def cached(self, spec: AnyJobSpec) -> PreflightReport | None:
        """Return the result of an earlier check of the same spec without problems, else None."""
        return self.in_order.get(spec.model_dump_json())


def _matches(job: Job, query: JobQuery) -> bool:
    return (
        (not query.states or job.state in query.states)
        and (query.projects is None or job.spec.project in query.projects)
        and query.name in (None, job.spec.name)
        and job.id.startswith(query.id_prefix or "")
        and all(job.spec.labels.get(key) == value for key, value in query.labels)
        and (query.after is None or job.id < query.after)
    )
