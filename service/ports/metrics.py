"""Ports for observability: metrics of requests, jobs and the service, and trace spans."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from service.domain.jobs.job import JobState

Counts = Mapping[tuple[JobState, str], int]
"""Number of jobs by state and project."""


@dataclass(frozen=True)
class WebhookCounts:
    """Numbers of webhooks, and of their messages."""

    backlog: int = 0
    """Messages that are not delivered yet."""
    active: int = 0
    failing: int = 0
    """Webhooks with a message that was rejected at least FAILING times and is still retried."""
    disabled: int = 0


@dataclass(frozen=True)
class RunTotals:
    """Metrics of one running job. Ages are seconds until now. None means unknown."""

    project: str
    job: str
    name: str
    restarts: int
    progress_age: float
    checkpoint_age: float
    attempt: int = 1
    """Number of the newest attempt."""
    step: int = 0
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    data_wait: float | None = None
    waits_for: str | None = None
    """Reason code of a job that makes no progress."""


@dataclass(frozen=True)
class Totals:
    """Metrics of the whole service. Each of its processes reports the same values."""

    jobs: Counts = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Goodput of the running jobs by project: time of new steps, as a fraction of the time since the jobs started."""
    oldest_wait: Mapping[str, float] = field(default_factory=dict)
    """Seconds in the queue of the longest-waiting job, by project."""
    webhooks: WebhookCounts = field(default_factory=WebhookCounts)
    runs: tuple[RunTotals, ...] = ()
    cluster_up: bool = True
    database_up: bool = True
    silent_seconds: float = 0.0
    """Seconds since which Ray does not answer."""
    head_node: str = ""
    """Kubernetes node of Ray's head; empty if it is not known."""


class JobCounts(Protocol):
    """Counts of stored jobs and of webhook messages."""

    def counts(self) -> Counts:
        """Return the number of jobs by state and project. Must be fast."""

    def queued_since(self) -> Mapping[str, float]:
        """Return the time (Unix seconds) since which the longest-waiting job has been queued, by project."""

    def webhooks(self) -> WebhookCounts:
        """Return the numbers of webhooks and of their messages."""


class Metrics(Protocol):
    """Metrics of one process. Any of its threads may record them."""

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record a request: its method, route template, status, and the seconds until its response starts."""

    def followed(self, *, more: bool) -> None:
        """Record that a client has started (`more`) or stopped following a job."""

    def moved(self, state: JobState) -> None:
        """Record that a job has entered a state."""

    def waited(self, seconds: float) -> None:
        """Record the seconds that a job waited before it started."""

    def ended(self, outcome: str) -> None:
        """Record the outcome of an attempt."""

    def passed(self, seconds: float) -> None:
        """Record the seconds of a reconcile pass over all jobs."""

    def text(self, totals: Totals) -> bytes:
        """Return these metrics and those of the whole service in the text format of Prometheus."""
        return b""


class NoMetrics(Metrics):
    """A Watch that records nothing."""


class Tracer(Protocol):
    """Trace spans of operations."""

    def span(self, name: str, **attributes: str) -> AbstractContextManager[None]:
        """Open a span until the context exits. Spans that start within it are its children."""
        return nullcontext()


class NoTracer(Tracer):
    """A Traces that records nothing."""
