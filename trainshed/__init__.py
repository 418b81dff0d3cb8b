"""The typed Python client of Trainshed; docs/guides/client.md shows its use.

It needs pydantic, PyYAML, httpx and httpx-sse only. `trainshed.cli`, the `trainshed` command, needs the extra
`service`.
"""

from service.api.schemas import Line
from service.domain.jobs.job import JobState
from trainshed._async.api import AsyncApi
from trainshed._async.client import AsyncClient
from trainshed._async.job import AsyncJob
from trainshed._sync.api import Api
from trainshed._sync.client import Client
from trainshed._sync.job import Job
from trainshed.errors import AmbiguousId, ApiError, ExportFailed, JobCancelled, JobEnded, JobFailed, NoKeyError

__all__ = [
    "AmbiguousId",
    "Api",
    "ApiError",
    "AsyncApi",
    "AsyncClient",
    "AsyncJob",
    "Client",
    "ExportFailed",
    "Job",
    "JobCancelled",
    "JobEnded",
    "JobFailed",
    "JobState",
    "Line",
    "NoKeyError",
]
