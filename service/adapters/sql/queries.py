"""JobQuery in SQL."""

from sqlalchemy import Select, exists, select

from service.adapters.sql.tables import jobs, labels
from service.ports import JobQuery


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
