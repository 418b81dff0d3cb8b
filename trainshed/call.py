"""Calls of the REST API as data: how each is sent, and how its response is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from trainshed.errors import error_of

T = TypeVar("T")
Query = Mapping[str, str | int | date | Sequence[str] | None]
_CALL_SECONDS = 180.0
"""Default timeout: a submit checks data and model first, which may take long."""
_STREAM_SECONDS = 60.0
"""Timeout of a stream; the service sends keep-alive comments four times as often."""
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """A call of the REST API, and the type of its response or of each line of its stream."""

    response: type[T]
    method: str
    path: str
    query: Query = field(default_factory=dict)
    body: BaseModel | str | bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """True if the call is idempotent. A POST that creates is idempotent if it sends an Idempotency-Key."""
    seconds: float | None = _CALL_SECONDS
    """Timeout in seconds, except for connecting; None means no timeout."""

    def request(self, http: httpx.Client | httpx.AsyncClient, **headers: str) -> httpx.Request:
        """Build the request. Each retry sends the same one."""
        query = {name: str(v) if isinstance(v, date) else v for name, v in self.query.items() if v not in (None, [])}
        body = self.body.model_dump_json() if isinstance(self.body, BaseModel) else self.body
        timeout = httpx.Timeout(self.seconds, connect=_CONNECT_SECONDS)
        return http.build_request(
            self.method, self.path, params=query, content=body, headers={**self.headers, **headers}, timeout=timeout
        )

    def read(self, response: httpx.Response) -> T:
        """Return the parsed response. Raises ApiError, or httpx.HTTPStatusError if the error is not from Trainshed."""
        if not response.is_success:
            raise error_of(response)
        return self.parse(response.content or b"null")

    def parse(self, content: bytes | str) -> T:
        """Parse a response, or one line of a stream, from JSON. Raises httpx.DecodingError if it has another form."""
        try:
            return TypeAdapter(self.response).validate_json(content)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise httpx.DecodingError(
                f"{self.method} {self.path}: the server does not answer like Trainshed: {fault}"
            ) from error


def segment(value: str | int) -> str:
    """Quote a value for use as one segment of a path."""
    return quote(str(value), safe="")


def stream(line: type[T], path: str, query: Query) -> Call[T]:
    """Return the call that requests a stream of lines."""
    return Call(line, "GET", path, query, seconds=_STREAM_SECONDS)


def idempotency(key: str | None) -> dict[str, str]:
    """Return an Idempotency-Key header. All retries of a call send the same key, so that it creates one job."""
    return {"Idempotency-Key": key or uuid4().hex}


def job_path(job_id: str) -> str:
    """Return the path of a job."""
    return f"/jobs/{segment(job_id)}"


def checkpoint_path(job_id: str, step: int) -> str:
    """Return the path of a checkpoint."""
    return f"{job_path(job_id)}/checkpoints/{segment(step)}"


def webhook_path(webhook_id: str) -> str:
    """Return the path of a webhook."""
    return f"/webhooks/{segment(webhook_id)}"
