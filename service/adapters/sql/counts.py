"""JobCounts on SQLAlchemy."""

from sqlalchemy import Engine, func, select

from service.adapters.sql.tables import jobs
from service.domain.job import JobState
from service.ports import Counts


class SqlJobCounts:
    """Counts the jobs in a database; its index by state and project has all that is asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def counts(self) -> Counts:
        """How many jobs there are by state and project."""
        query = select(jobs.c.state, jobs.c.project, func.count()).group_by(jobs.c.state, jobs.c.project)
        with self._engine.connect() as connection:
            return {(JobState(state), project): count for state, project, count in connection.execute(query)}
