"""Who watches the service: what it is told of requests, of jobs and of itself, and spans of what takes time."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from service.domain.job import JobState

Counts = Mapping[tuple[JobState, str], int]
"""How many jobs there are by state and project."""


@dataclass(frozen=True)
class RunTotals:
    """One job that runs. Times are seconds until now; None is unknown."""

    project: str
    job: str
    name: str
    restarts: int
    progress_age: float
    checkpoint_age: float
    step: int = 0
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    data_wait: float | None = None
    waits_for: str | None = None
    """The code of what it waits for, if it makes no progress."""


@dataclass(frozen=True)
class Totals:
    """What is true of the whole service, whichever of its processes says it."""

    jobs: Counts = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)
    """By project, of its jobs that run now: time of steps that were new, as a part of all since they started."""
    oldest_wait: Mapping[str, float] = field(default_factory=dict)
    """By project, for how many seconds the job that has waited longest has been queued."""
    backlog: int = 0
    """Webhook messages that are not delivered yet."""
    runs: tuple[RunTotals, ...] = ()
    cluster_up: bool = True
    database_up: bool = True


class JobCounts(Protocol):
    """Counts stored jobs."""

    def counts(self) -> Counts:
        """How many jobs there are by state and project; quick."""

    def queued_since(self) -> Mapping[str, float]:
        """By project, since when (Unix seconds) the job that has waited longest has been queued."""

    def backlog(self) -> int:
        """How many webhook messages are not delivered yet."""


class Watch(Protocol):
    """What a process is told of itself, by any of its threads."""

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request of a route, by its template, was answered after so many seconds."""

    def followed(self, *, more: bool) -> None:
        """Somebody has begun to follow a job, or has gone."""

    def moved(self, state: JobState) -> None:
        """A job has come into a state."""

    def waited(self, seconds: float) -> None:
        """A job has started after so long in the queue."""

    def ended(self, outcome: str) -> None:
        """An attempt is over."""

    def passed(self, seconds: float) -> None:
        """The reconciler has looked after every job, which took it so long."""

    def text(self, totals: Totals) -> bytes:
        """All of it, and what is true of the whole service, as Prometheus reads it."""
        return b""


class Unwatched(Watch):
    """Nobody looks."""


class Traces(Protocol):
    """Spans of what takes time."""

    def span(self, name: str, **attributes: str) -> AbstractContextManager[None]:
        """A span from here to its end; those that begin within are its children."""
        return nullcontext()


class Untraced(Traces):
    """Nobody asked for traces."""
