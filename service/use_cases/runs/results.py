"""Use case of an inference job's results: a page of committed rows."""

from service.domain.access.roles import Principal
from service.errors import NoResults
from service.ports import Cancellation, ResultPages
from service.use_cases.jobs.jobs import Jobs


def read_results(
    jobs: Jobs,
    pages: ResultPages,
    caller: Principal,
    job_id: str,
    *,
    after: int | None,
    limit: int,
    cancellation: Cancellation,
) -> bytes:
    """Return the committed rows after a row's id as JSON: data, has_more and next.

    Raises JobNotFound, NoResults, ResultsUnreadable, CallCancelled.
    """
    job = jobs.find(caller, job_id)
    if job.spec.trains:
        raise NoResults(job.id, job.spec.kind)
    return pages.results(job.run_dir, after=after, limit=limit, cancellation=cancellation)
