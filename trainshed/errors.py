"""Errors of the client."""

import httpx
from pydantic import ValidationError

from service.api.schemas import JobOut, ProblemDetails


class NoKeyError(LookupError):
    """No API key was found; the message names the places that were searched."""


class InvalidUrl(ValueError):
    """An invalid TRAINSHED_URL."""


class ApiError(Exception):
    """An error response of the service; `problem` holds its details."""

    def __init__(self, problem: ProblemDetails, retry_after: float | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.retry_after = retry_after
        """Seconds after which a retry may succeed."""

    @property
    def code(self) -> str:
        """The stable error code."""
        return self.problem.code

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status


class JobEnded(Exception):
    """The end of a job in a state that was not awaited; `job` holds its final data."""

    def __init__(self, job: JobOut) -> None:
        why = f": {job.reason.message}" if job.reason else ""
        super().__init__(f"{job.id} is {job.state}{why}")
        self.job = job


class JobFailed(JobEnded):
    """The failure of an awaited job."""


class JobCancelled(JobEnded):
    """The cancellation of an awaited job."""


class ExportFailed(Exception):
    """A failed export of a checkpoint; `str(error)` contains the reason."""


class AmbiguousId(LookupError):
    """An id prefix that matches several jobs."""


def error_of(response: httpx.Response) -> Exception:
    """Return the ApiError of a response, or an HTTPStatusError if the response is not from Trainshed."""
    try:
        problem = ProblemDetails.model_validate_json(response.content)
    except ValidationError:
        what = f"{response.status_code} from {response.url}, which does not answer like Trainshed"
        return httpx.HTTPStatusError(what, request=response.request, response=response)
    return ApiError(problem, retry_after_of(response))


def retry_after_of(response: httpx.Response) -> float | None:
    """Return the seconds of the Retry-After header, or None."""
    given = response.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else None
