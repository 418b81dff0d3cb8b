"""Watch for Prometheus: the one place that knows its client, with a registry of its own for each app."""

import time
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from service.domain.job import JobState
from service.ports import Totals

_REQUEST_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAIT_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_PASS_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class PrometheusWatch:
    """Counts what it is told. Threads may share it."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "trainshed_http_requests_total", "Answers.", ["method", "route", "status"], registry=own
        )
        self._request_seconds = Histogram(
            "trainshed_http_request_seconds",
            "Until an answer begins.",
            ["method", "route"],
            buckets=_REQUEST_SECONDS,
            registry=own,
        )
        self._followers = Gauge("trainshed_stream_clients", "Those who follow a job now.", registry=own)
        self._moves = Counter("trainshed_job_moves_total", "Jobs that came into a state.", ["state"], registry=own)
        self._attempts = Counter("trainshed_attempts_total", "Attempts that ended.", ["outcome"], registry=own)
        self._waits = Histogram(
            "trainshed_queue_wait_seconds", "From the queue to the start.", buckets=_WAIT_SECONDS, registry=own
        )
        self._passes = Histogram(
            "trainshed_reconcile_pass_seconds", "A look after every job.", buckets=_PASS_SECONDS, registry=own
        )
        self._passed_at = time.monotonic()
        lag = Gauge("trainshed_reconcile_lag_seconds", "Since every job was last looked after.", registry=own)
        lag.set_function(lambda: time.monotonic() - self._passed_at)
        ProcessCollector(registry=own)
        # Its label values cost more to look up than to count: routes and statuses are few.
        self._request = cache(self._children)

    def _children(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        return self._requests.labels(method, route, status), self._request_seconds.labels(method, route)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request of a route, by its template, was answered after so many seconds."""
        requests, times = self._request(method, route, status)
        requests.inc()
        times.observe(seconds)

    def followed(self, *, more: bool) -> None:
        """Somebody has begun to follow a job, or has gone."""
        self._followers.inc(1 if more else -1)

    def moved(self, state: JobState) -> None:
        """A job has come into a state."""
        self._moves.labels(state).inc()

    def waited(self, seconds: float) -> None:
        """A job has started after so long in the queue."""
        self._waits.observe(seconds)

    def ended(self, outcome: str) -> None:
        """An attempt is over."""
        self._attempts.labels(outcome).inc()

    def passed(self, seconds: float) -> None:
        """The reconciler has looked after every job, which took it so long."""
        self._passes.observe(seconds)
        self._passed_at = time.monotonic()

    def text(self, totals: Totals) -> bytes:
        """All of it, and what is true of the whole service, in the text format of Prometheus."""
        return generate_latest(_whole(totals)) + generate_latest(self._registry)


def _whole(totals: Totals) -> CollectorRegistry:
    registry = CollectorRegistry()
    jobs = Gauge("trainshed_jobs", "Stored jobs.", ["state", "project"], registry=registry)
    for project in {project for _, project in totals.jobs}:
        for state in JobState:
            # A state that nobody is in is told: an alert on it would otherwise see nothing, not 0.
            jobs.labels(state, project).set(totals.jobs.get((state, project), 0))
    goodput = Gauge(
        "trainshed_goodput_ratio",
        "Time of new steps, as a part of all, of jobs that run.",
        ["project"],
        registry=registry,
    )
    for project, ratio in totals.goodput.items():
        goodput.labels(project).set(ratio)
    return registry
