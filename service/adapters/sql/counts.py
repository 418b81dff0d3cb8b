"""JobCounts on SQLAlchemy."""

from collections.abc import Mapping

from sqlalchemy import JSON, Engine, cast, func, select, type_coerce

from service.adapters.sql.tables import deliveries, jobs
from service.domain.jobs.job import JobState
from service.ports import Counts


class SqlJobCounts:
    """JobCounts of a database. The index by state and project holds all that `counts` reads."""

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

    def backlog(self) -> int:
        """Return the number of webhook messages that are not delivered yet."""
        query = select(func.count()).where(deliveries.c.next_at.is_not(None))
        with self._engine.connect() as connection:
            return connection.execute(query).scalar_one()
