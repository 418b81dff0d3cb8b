"""Models that several calls share: times, pages, health, and errors as problem details."""

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, GetPydanticSchema, PlainSerializer

from service.domain.access.roles import Role
from service.domain.jobs.job import JobState

T = TypeVar("T")


def read_as(kind: Any) -> GetPydanticSchema:
    """Return the metadata of an Annotated type that is validated and documented as `kind`.

    The annotated type itself is for type checkers: it is what a user's script may pass.
    """
    return GetPydanticSchema(lambda _, handler: handler(kind))


RoleName = Annotated[Role | Literal["viewer", "editor", "admin"], read_as(Role)]
StateName = Annotated[
    JobState
    | Literal[
        "QUEUED",
        "STARTING",
        "RUNNING",
        "RECOVERING",
        "PAUSING",
        "PAUSED",
        "CANCELLING",
        "CANCELLED",
        "SUCCEEDED",
        "FAILED",
    ],
    read_as(JobState),
]
Time = Annotated[datetime, PlainSerializer(lambda time: time.isoformat(timespec="milliseconds"), return_type=str)]
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
"""Level of a log line."""
Line = dict[str, Any]
"""An event, or the metrics of a logged step, as plain JSON: scripts compute with its numbers."""


class Page(BaseModel, Generic[T]):
    """A page of a list. `next` is the cursor for `?after=`; it is null if nothing can follow."""

    data: list[T]
    has_more: bool
    next: str | None


LinePage = Page[Line]
TextPage = Page[str]


class Health(BaseModel):
    """Health of the service, in one word."""

    status: str


class ProblemOut(BaseModel):
    """One error in a spec or a request."""

    pointer: str
    message: str
    line: int | None = Field(default=None, ge=1, description="line in the YAML body, from 1; absent for JSON")
    column: int | None = Field(default=None, ge=1, description="column in the YAML body, from 1, in characters")


class ProblemDetails(BaseModel):
    """Problem details of an error, as in RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    errors: list[ProblemOut] | None = None
