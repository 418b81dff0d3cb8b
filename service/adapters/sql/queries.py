"""Queries of jobs in SQL: those that match a filter, and counts for the metrics."""

from collections.abc import Mapping

from sqlalchemy import JSON, Engine, Select, case, cast, exists, func, select, type_coerce

from service.adapters.sql.tables import deliveries, jobs, labels, webhooks
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import FAILING
from service.ports import Counts, JobQuery, WebhookCounts


def matching(query: JobQuery) -> Select[tuple[object, ...]]:
    """Build the query of the matching jobs, without an order."""
    found = select(jobs)
    if query.states:
        found = found.where(jobs.c.state.in_(query.states))
    if query.projects is not None:
        found = found.where(jobs.c.project.in_(query.projects))
    if query.name is not None:
        found = found.where(jobs.c.name == query.name)
    if query.id_prefix is not None:
        # A range uses the primary key's index. In any collation, no id with this prefix sorts after its upper bound.
        found = found.where(jobs.c.id.between(query.id_prefix, query.id_prefix + "z" * 32))
    if query.after is not None:
        found = found.where(jobs.c.id < query.after)
    for key, value in query.labels:
        same = (labels.c.job_id == jobs.c.id) & (labels.c.key == key) & (labels.c.value == value)
        found = found.where(exists().where(same))
    return found


class SqlJobCounts:
    """JobCounts on SQLAlchemy. The index by state and project holds all that `counts` reads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def counts(self) -> Counts:
        """Return the number of jobs by state and project."""
        query = select(jobs.c.state, jobs.c.project, func.count()).group_by(jobs.c.state, jobs.c.project)
        with self._engine.connect() as connection:
            return {(JobState(state), project): count for state, project, count in connection.execute(query)}

    def queued_since(self) -> Mapping[str, float]:
        """Return the time (Unix seconds) since which the longest-waiting job has been queued, by project."""
        # SQLite reads JSON from text; Postgres needs a cast.
        sqlite = self._engine.dialect.name == "sqlite"
        times = type_coerce(jobs.c.times, JSON) if sqlite else cast(jobs.c.times, JSON)
        since = func.min(func.coalesce(times[JobState.QUEUED.value].as_float(), jobs.c.created_at))
        query = select(jobs.c.project, since).where(jobs.c.state == JobState.QUEUED).group_by(jobs.c.project)
        with self._engine.connect() as connection:
            return {row.project: row[1] for row in connection.execute(query)}

    def webhooks(self) -> WebhookCounts:
        """Return the numbers of webhooks and of their messages."""
        waits = deliveries.c.next_at.is_not(None)
        rejected = exists().where(deliveries.c.webhook_id == webhooks.c.id, waits, deliveries.c.attempts >= FAILING)
        failing = case(((webhooks.c.disabled_at.is_(None)) & rejected, 1))
        every = select(func.count(), func.count(failing), func.count(webhooks.c.disabled_at)).select_from(webhooks)
        with self._engine.connect() as connection:
            backlog = connection.execute(select(func.count()).where(waits)).scalar_one()
            number, failed, disabled = connection.execute(every).one()
        return WebhookCounts(backlog, number - failed - disabled, failed, disabled)
