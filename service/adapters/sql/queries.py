"""What a JobQuery is in SQL."""

from sqlalchemy import Select, exists, select

from service.adapters.sql.tables import jobs, labels
from service.ports import JobQuery


def matching(query: JobQuery) -> Select[tuple[object, ...]]:
    """The jobs that it asks for, in no order."""
    found = select(jobs)
    if query.states:
        found = found.where(jobs.c.state.in_(query.states))
    if query.projects is not None:
        found = found.where(jobs.c.project.in_(query.projects))
    if query.name is not None:
        found = found.where(jobs.c.name == query.name)
    if query.id_prefix is not None:
        # No id goes on with more than z, in any collation: a range of the primary key's index.
        found = found.where(jobs.c.id.between(query.id_prefix, query.id_prefix + "z" * 32))
    if query.after is not None:
        found = found.where(jobs.c.id < query.after)
    for key, value in query.labels:
        same = (labels.c.job_id == jobs.c.id) & (labels.c.key == key) & (labels.c.value == value)
        found = found.where(exists().where(same))
    return found
