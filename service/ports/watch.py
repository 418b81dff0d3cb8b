"""Who watches the service: what it is told of requests, of jobs and of itself, and spans of what takes time."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from service.domain.job import JobState

Counts = Mapping[tuple[JobState, str], int]
"""How many jobs there are by state and project."""


@dataclass(frozen=True)
class Totals:
    """What is true of the whole service, whichever of its processes says it."""

    jobs: Counts = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)
    """By project, of its jobs that run now: time of steps that were new, as a part of all since they started."""


class JobCounts(Protocol):
    """Counts stored jobs."""

    def counts(self) -> Counts:
        """How many jobs there are by state and project; quick."""


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
