"""JobStore on SQLAlchemy; the same statements on SQLite and Postgres."""

from collections.abc import Sequence

from sqlalchemy import Connection, Engine, Row, Select, and_, exists, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from service.adapters.sql.rows import from_row, to_row
from service.adapters.sql.tables import idempotency_keys, jobs, labels
from service.domain.admission import queue_order
from service.domain.job import LIVE, Job
from service.errors import IdempotencyMismatch
from service.ports import JobQuery, Lease, Once


class SqlJobStore:
    """Jobs in a database. Every method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, job: Job, once: Once | None) -> tuple[Job, bool]:
        """Store a job; with a known key, answer the job of that key and False. Raises IdempotencyMismatch."""
        try:
            with self._engine.begin() as connection:
                _insert(connection, job, once)
        except IntegrityError:
            # The unique key decides between two that came at once: the other one was first.
            known = self.replay(once) if once else None
            if known is None:
                raise
            return known, False
        return job, True

    def replay(self, once: Once) -> Job | None:
        """The job that a key stands for, if it was used. Raises IdempotencyMismatch."""
        query = (
            select(idempotency_keys.c.body.label("body_sha256"), jobs)
            .join(jobs, jobs.c.id == idempotency_keys.c.job_id)
            .where(idempotency_keys.c.key == once.key)
        )
        row = self._first(query)
        if row is not None and row.body_sha256 != once.body:
            raise IdempotencyMismatch(once.key)
        return from_row(row) if row is not None else None

    def get(self, job_id: str) -> Job | None:
        """The job with this id."""
        row = self._first(select(jobs).where(jobs.c.id == job_id))
        return from_row(row) if row is not None else None

    def page(self, query: JobQuery) -> list[Job]:
        """The jobs that match, newest first."""
        return self._all(_matching(query).order_by(jobs.c.id.desc()).limit(query.limit))

    def live(self) -> list[Job]:
        """Every job that has not ended, in the order in which they start."""
        return sorted(self._all(select(jobs).where(jobs.c.state.in_(LIVE))), key=queue_order)

    def claim(self, job_id: str, lease: Lease) -> Job | None:
        """The job, if nobody else holds it; it is this owner's until the lease ends.

        A lease that has more than half of its time left is not written again: a quiet pass writes nothing.
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

    def save(self, job: Job, *, owner: str | None = None) -> bool:
        """Store a change of the version that was read, as the lease's owner if one is named; False: discarded."""
        guard = (jobs.c.id == job.id) & (jobs.c.version == job.version)
        if owner is not None:
            guard &= jobs.c.lease_owner == owner
        values = to_row(job) | {"version": job.version + 1}
        with self._engine.begin() as connection:
            return connection.execute(update(jobs).where(guard).values(values)).rowcount == 1

    def ping(self) -> None:
        """Raise unless the database answers."""
        self._first(select(jobs).limit(1))

    def _first(self, query: Select[tuple[object, ...]]) -> Row[tuple[object, ...]] | None:
        with self._engine.connect() as connection:
            return connection.execute(query).first()

    def _all(self, query: Select[tuple[object, ...]]) -> list[Job]:
        with self._engine.connect() as connection:
            rows: Sequence[Row[tuple[object, ...]]] = connection.execute(query).all()
        return [from_row(row) for row in rows]


def _insert(connection: Connection, job: Job, once: Once | None) -> None:
    connection.execute(insert(jobs).values(to_row(job)))
    pairs = [{"job_id": job.id, "key": key, "value": value} for key, value in job.spec.labels.items()]
    if pairs:
        connection.execute(insert(labels), pairs)
    if once is not None:
        connection.execute(insert(idempotency_keys).values(key=once.key, body=once.body, job_id=job.id))


def _matching(query: JobQuery) -> Select[tuple[object, ...]]:
    found = select(jobs)
    if query.states:
        found = found.where(jobs.c.state.in_(query.states))
    if query.project is not None:
        found = found.where(jobs.c.project == query.project)
    if query.name is not None:
        found = found.where(jobs.c.name == query.name)
    if query.after is not None:
        found = found.where(jobs.c.id < query.after)
    for key, value in query.labels:
        same = (labels.c.job_id == jobs.c.id) & (labels.c.key == key) & (labels.c.value == value)
        found = found.where(exists().where(same))
    return found
