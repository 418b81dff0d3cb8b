"""JobStore on SQLAlchemy; the same statements on SQLite and Postgres."""

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import date

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.exc import IntegrityError

from service.adapters.sql.access import write_audit_entries
from service.adapters.sql.database import status_of
from service.adapters.sql.outbox import enqueue_events, events_for_change, events_for_new_jobs
from service.adapters.sql.queries import matching
from service.adapters.sql.rows import from_row, queue_entry_of, to_row
from service.adapters.sql.tables import deleted_usage, idempotency_keys, jobs, labels, leases
from service.domain.access.roles import AuditEntry
from service.domain.jobs.job import ACTIVE, Job
from service.domain.jobs.usage import Usage, UsageByDay
from service.domain.queue.entry import QueueEntry
from service.errors import IdempotencyMismatch
from service.ports import IDEMPOTENCY_TTL, IdempotencyKey, JobQuery, Lease, NewJob

_QUEUE = "queue"
_PROBE = "probe"
_ENTRY = (
    jobs.c.id,
    jobs.c.project,
    jobs.c.priority,
    jobs.c.state,
    jobs.c.size,
    jobs.c.holds,
    jobs.c.waits,
    jobs.c.sizes,
    jobs.c.since,
    jobs.c.ulysses,
    jobs.c.memory,
    jobs.c.version,
)
_NAMED = 1000
"""Maximum number of job ids that a statement lists."""
_IN_QUEUE = or_(jobs.c.holds == 1, jobs.c.waits == 1)


class SqlJobStore:
    """A JobStore in a database. Every method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entries: dict[str, tuple[int, QueueEntry]] = {}

    def job_of(self, key: IdempotencyKey, *, now: float) -> Job | None:
        """Return the job of a key; None if it has none. Raises IdempotencyMismatch if the body differs."""
        query = (
            select(idempotency_keys.c.body.label("body_sha256"), jobs)
            .join_from(idempotency_keys, jobs, jobs.c.id == idempotency_keys.c.job_id)
            .where(idempotency_keys.c.key == key.id, ~_outdated(now))
        )
        row = self._first(query)
        if row is not None and row.body_sha256 != key.body:
            raise IdempotencyMismatch(key.key)
        return None if row is None else from_row(row)

    def add(self, new: NewJob) -> bool:
        """Store a job and its key durably, in one transaction. Return False if the key refers to another job."""
        return self.add_all([new], now=new.job.created_at)

    def add_all(self, added: Sequence[NewJob], *, now: float) -> bool:
        """Store jobs and their keys durably, all or none. Return False if a key refers to another job."""
        keys = [
            {"key": new.key.id, "body": new.key.body, "created_at": now, "job_id": new.job.id}
            for new in added
            if new.key is not None
        ]
        try:
            with self._engine.begin() as connection:
                _insert(connection, added)
                if keys:
                    connection.execute(delete(idempotency_keys).where(_outdated(now)))
                    connection.execute(insert(idempotency_keys), keys)
        except IntegrityError:
            return False
        return True

    def delete(self, job: Job, used: Mapping[date, Usage], entry: AuditEntry | None = None) -> bool:
        """Delete a job, but keep its usage of each day (UTC). Return False if the job changed since it was read."""
        kept = {"job_id": job.id, "project": job.spec.project}
        with self._engine.begin() as connection:
            if connection.execute(delete(jobs).where(_unchanged(job))).rowcount != 1:
                return False
            if used:
                hours = [kept | {"day": day} | asdict(usage) for day, usage in used.items()]
                connection.execute(insert(deleted_usage), hours)
            write_audit_entries(connection, [entry])
        return True

    def get(self, job_id: str) -> Job | None:
        """Return the job with this id; None if there is none."""
        row = self._first(select(jobs).where(jobs.c.id == job_id))
        return from_row(row) if row is not None else None

    def page(self, query: JobQuery) -> list[Job]:
        """Return the matching jobs, newest first."""
        return self._all(matching(query).order_by(jobs.c.id.desc()).limit(query.limit))

    def used_between(self, since: float, until: float, *, projects: frozenset[str] | None = None) -> list[Job]:
        """Return the jobs that started before `until` and had not finished at `since` (Unix seconds)."""
        query = select(jobs).where(
            jobs.c.started_at < until, or_(jobs.c.finished_at.is_(None), jobs.c.finished_at > since)
        )
        return self._all(query if projects is None else query.where(jobs.c.project.in_(projects)))

    def used_by_deleted(self, first: date, last: date, *, projects: frozenset[str] | None = None) -> UsageByDay:
        """Return the usage of deleted jobs from day `first` to day `last`."""
        columns = deleted_usage.c
        hours = [func.sum(columns[field.name]).label(field.name) for field in fields(Usage)]
        query = select(columns.project, columns.day, *hours).where(columns.day.between(first, last))
        if projects is not None:
            query = query.where(columns.project.in_(projects))
        with self._engine.connect() as connection:
            rows = connection.execute(query.group_by(columns.project, columns.day)).all()
        return {(project, day): Usage(*used) for project, day, *used in rows}

    def queue_entries(self) -> list[QueueEntry]:
        """Return the entries of all jobs that hold resources of the cluster or wait for them."""
        known = self._entries
        with self._engine.connect() as connection:
            now = connection.execute(select(jobs.c.id, jobs.c.version).where(_IN_QUEUE)).all()
            # Reuse unchanged entries: of ten thousand jobs, only a few have changed since the last call.
            same = {job_id: known[job_id] for job_id, version in now if known.get(job_id, (0,))[0] == version}
            others = [job_id for job_id, _ in now if job_id not in same]
            which = jobs.c.id.in_(others) if len(others) <= _NAMED else true()
            rows = connection.execute(select(*_ENTRY).where(_IN_QUEUE, which)).all() if others else []
        # `rows` leaves out a job that left the queue between the two queries.
        self._entries = same | {row.id: (row.version, queue_entry_of(row)) for row in rows}
        return [entry for _, entry in self._entries.values()]

    def queue_version(self) -> Hashable:
        """Return a value that changes whenever the result of `queue_entries` may change. Much faster than that."""
        rows = func.count(), func.max(jobs.c.id), func.sum(jobs.c.version), func.sum(jobs.c.updated_at)
        with self._engine.connect() as connection:
            return tuple(connection.execute(select(*rows).where(_IN_QUEUE)).one())

    def lead(self, lease: Lease) -> bool:
        """Take or renew the queue's lease: only its owner decides about the queue. Return whether this owner has it."""
        return self._take(_QUEUE, lease)

    def _take(self, name: str, lease: Lease) -> bool:
        free = or_(leases.c.owner == lease.owner, leases.c.until < lease.now)
        take = update(leases).where(leases.c.name == name, free).values(owner=lease.owner, until=lease.until)
        try:
            with self._engine.begin() as connection:
                if connection.execute(take).rowcount == 1:
                    return True
                if connection.execute(select(leases.c.name).where(leases.c.name == name)).first() is not None:
                    return False
                connection.execute(insert(leases).values(name=name, owner=lease.owner, until=lease.until))
        except IntegrityError:
            # Another owner has inserted the very first lease at the same time.
            return False
        return True

    def active(self) -> list[str]:
        """Return the ids of the jobs to reconcile: all except waiting, paused and finished jobs."""
        with self._engine.connect() as connection:
            return list(connection.execute(select(jobs.c.id).where(jobs.c.state.in_(ACTIVE))).scalars())

    def claim(self, job_id: str, lease: Lease) -> Job | None:
        """Lease a job to this owner until the lease ends, and return it; None if another owner has it.

        A lease with more than half of its time left is not renewed: a pass without changes writes nothing.
        """
        renew_before = lease.now + (lease.until - lease.now) / 2
        free = or_(
            jobs.c.lease_owner.is_(None),
            jobs.c.lease_until < lease.now,
            and_(jobs.c.lease_owner == lease.owner, jobs.c.lease_until < renew_before),
        )
        mine = (jobs.c.id == job_id) & (jobs.c.lease_owner == lease.owner)
        with self._engine.begin() as connection:
            connection.execute(
                update(jobs).where(jobs.c.id == job_id, free).values(lease_owner=lease.owner, lease_until=lease.until)
            )
            row = connection.execute(select(jobs).where(mine)).first()
        return from_row(row) if row is not None else None

    def give_up_leases(self, owner: str) -> None:
        """Release all leases of this owner at once. The store discards its later changes under them."""
        with self._engine.begin() as connection:
            connection.execute(
                update(jobs).where(jobs.c.lease_owner == owner).values(lease_owner=None, lease_until=None)
            )
            connection.execute(delete(leases).where(leases.c.owner == owner))

    def save(self, job: Job, *, owner: str | None = None, leads: bool = False, entry: AuditEntry | None = None) -> bool:
        """Store a change to the version that was read. Return False if the change was discarded.

        With `owner`, the owner must have the job's lease; with `leads`, the queue's lease instead.
        """
        guard = _unchanged(job)
        if owner is not None and not leads:
            guard &= jobs.c.lease_owner == owner
        values = to_row(job) | {"version": job.version + 1}
        # Write the lease, so that the next leader waits for this transaction and sees its changes.
        lead = update(leases).where(leases.c.name == _QUEUE, leases.c.owner == owner).values(owner=owner)
        with self._engine.begin() as connection:
            if leads and connection.execute(lead).rowcount != 1:
                return False
            events = events_for_change(connection, job)
            if connection.execute(update(jobs).where(guard).values(values)).rowcount != 1:
                return False
            enqueue_events(connection, events)
            write_audit_entries(connection, [entry])
        return True

    def ping(self) -> None:
        """Raise NotReady unless the database answers, and accepts a write if one has failed."""
        status = status_of(self._engine)
        self._first(select(jobs).limit(1))
        if not status.writes_fail:
            return
        # Use a new value each time: SQLite does not write a row that does not change.
        lease = Lease(_PROBE, now=math.inf, until=time.time())
        self._take(_PROBE, lease)
        status.check_room()
        status.writes_fail = False

    def _first(self, query: Select[tuple[object, ...]]) -> Row[tuple[object, ...]] | None:
        with self._engine.connect() as connection:
            return connection.execute(query).first()

    def _all(self, query: Select[tuple[object, ...]]) -> list[Job]:
        with self._engine.connect() as connection:
            rows: Sequence[Row[tuple[object, ...]]] = connection.execute(query).all()
        return [from_row(row) for row in rows]


def _insert(connection: Connection, added: Sequence[NewJob]) -> None:
    connection.execute(insert(jobs), [to_row(new.job) for new in added])
    given = [(new.job.id, new.job.spec.labels) for new in added]
    pairs = [{"job_id": job_id, "key": key, "value": value} for job_id, pairs in given for key, value in pairs.items()]
    if pairs:
        connection.execute(insert(labels), pairs)
    enqueue_events(connection, events_for_new_jobs(connection, [new.job for new in added]))
    write_audit_entries(connection, [entry for new in added for entry in new.audit_entries])


def _outdated(now: float) -> ColumnElement[bool]:
    return idempotency_keys.c.created_at < now - IDEMPOTENCY_TTL


def _unchanged(job: Job) -> ColumnElement[bool]:
    return and_(jobs.c.id == job.id, jobs.c.version == job.version)
