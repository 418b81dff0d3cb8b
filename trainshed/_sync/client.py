# Generated from trainshed/_async/client.py by `make client`; do not edit.

"""The synchronous client of a service."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

import httpx

from service.api.schemas import PlanOut
from trainshed._sync.api import Api
from trainshed._sync.connection import open_http
from trainshed._sync.job import Job, pages
from trainshed.job_base import Spec, States, is_complete_id, resolve_id, spec_text

_PATIENCE_SECONDS = 60.0
_PAGE = 100


class Client:
    """A connection to one service. `Client()` finds URL and key as the `trainshed` command does.

    Raises NoKeyError if no key is found, and InvalidUrl if no URL is found. Without a URL, the key is sent only to the
    service that runs in the home. Every call raises ApiError, or httpx.HTTPError if the service does not
    answer for `patience` seconds. `api` has all calls of the REST API.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        patience: float = _PATIENCE_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = open_http(url, key, transport=transport)
        self.api = Api(self._http, patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(self, spec: Spec, *, idempotency_key: str | None = None) -> Job:
        """Submit a job. Repeated submissions with the same key and spec return the same job."""
        return Job(self.api, self.api.submit(spec_text(spec), idempotency_key=idempotency_key))

    def plan(self, spec: Spec, *, device: str | None = None, suggest: bool = False) -> PlanOut:
        """Return the plan of a spec, after the checks of `submit`. Nothing is stored.

        With the name of a GPU (`device`), such as h100-80g, it is compared with that GPU instead of the cluster. With
        `suggest`, it lists changes with which it fits.
        """
        return self.api.plan(spec_text(spec), device=device, suggest=suggest)

    def job(self, job_id: str) -> Job:
        """Return a job by its id or a unique prefix of it. Raises AmbiguousId if several ids match."""
        found = None if is_complete_id(job_id) else resolve_id(job_id, (self.api.jobs(id_prefix=job_id)).data)
        return Job(self.api, found or self.api.job(job_id))

    def jobs(
        self,
        *,
        state: States = (),
        project: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Iterator[Job]:
        """Yield the jobs with one of these states, this project, this name and all these labels, newest first."""
        found = pages(
            lambda after: self.api.jobs(
                states=state, project=project, name=name, labels=labels, after=after, limit=_PAGE
            )
        )
        return (Job(self.api, info) for info in found)
