"""The typed Python client; docs/guides/client.md shows its use."""

from service.address import NoKeyError
from service.client.api import Api, AsyncApi
from service.client.async_client import AsyncClient
from service.client.async_job import AsyncJob
from service.client.client import Client
from service.client.errors import ApiError
from service.client.job import Job
from service.client.run_calls import Line
from service.client.seen import AmbiguousId, ExportFailed, JobCancelled, JobEnded, JobFailed
from service.domain.job import JobState

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
