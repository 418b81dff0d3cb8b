"""Metrics for Prometheus. Only this module imports its client. Each app has a separate registry."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from service.domain import metrics
from service.domain.jobs.job import JobState
from service.domain.metrics import Series
from service.ports import RunTotals, Totals

_OUTCOMES = ("succeeded", "failed", "paused", "cancelled", "resized", "moved", "service_stopped")
_REQUEST_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAIT_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_PASS_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


def _counter(one: Series, registry: CollectorRegistry) -> Counter:
    return Counter(one.full_name, one.help, one.labels, registry=registry)


def _gauge(one: Series, registry: CollectorRegistry) -> Gauge:
    return Gauge(one.full_name, one.help, one.labels, registry=registry)


def _histogram(one: Series, buckets: Sequence[float], registry: CollectorRegistry) -> Histogram:
    return Histogram(one.full_name, one.help, one.labels, buckets=buckets, registry=registry)


class PrometheusMetrics:
    """A Watch that records Prometheus metrics. Threads may share it."""

    def __init__(self, version: str = "unknown") -> None:
        self._registry = own = CollectorRegistry()
        _gauge(metrics.BUILD, own).labels(version).set(1)
        self._requests = _counter(metrics.HTTP_REQUESTS, own)
        self._request_seconds = _histogram(metrics.HTTP_SECONDS, _REQUEST_SECONDS, own)
        self._followers = _gauge(metrics.STREAMS, own)
        self._moves = _counter(metrics.MOVES, own)
        self._attempts = _counter(metrics.ATTEMPTS, own)
        # Create each series with 0: `rate` misses the first increment of a series that does not exist yet.
        for state in JobState:
            self._moves.labels(state)
        for outcome in _OUTCOMES:
            self._attempts.labels(outcome)
        self._waits = _histogram(metrics.QUEUE_WAIT, _WAIT_SECONDS, own)
        self._passes = _histogram(metrics.PASS_SECONDS, _PASS_SECONDS, own)
        self._passed_at = time.monotonic()
        _gauge(metrics.LAG, own).set_function(lambda: time.monotonic() - self._passed_at)
        ProcessCollector(registry=own)
        # Cached, because the lookup of label values takes longer than counting. Routes and statuses are few.
        self._request = cache(self._children)

    def _children(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        return self._requests.labels(method, route, status), self._request_seconds.labels(method, route)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record a request: its method, route template, status, and the seconds until its response starts."""
        requests, times = self._request(method, route, status)
        requests.inc()
        times.observe(seconds)

    def followed(self, *, more: bool) -> None:
        """Record that a client has started (`more`) or stopped following a job."""
        self._followers.inc(1 if more else -1)

    def moved(self, state: JobState) -> None:
        """Record that a job has entered a state."""
        self._moves.labels(state).inc()

    def waited(self, seconds: float) -> None:
        """Record the seconds that a job waited before it started."""
        self._waits.observe(seconds)

    def ended(self, outcome: str) -> None:
        """Record the outcome of an attempt."""
        self._attempts.labels(outcome).inc()

    def passed(self, seconds: float) -> None:
        """Record the seconds of a reconcile pass over all jobs."""
        self._passes.observe(seconds)
        self._passed_at = time.monotonic()

    def text(self, totals: Totals) -> bytes:
        """Return these metrics and those of the whole service in the text format of Prometheus."""
        return generate_latest(_whole(totals)) + generate_latest(self._registry)


def _whole(totals: Totals) -> CollectorRegistry:
    registry = CollectorRegistry()
    _gauge(metrics.DATABASE_UP, registry).set(totals.database_up)
    _gauge(metrics.CLUSTER_UP, registry).set(totals.cluster_up)
    _gauge(metrics.CLUSTER_SILENT, registry).labels(totals.head_node).set(totals.silent_seconds)
    if not totals.database_up:
        return registry
    jobs = _gauge(metrics.JOBS, registry)
    for project in {project for _, project in totals.jobs}:
        for state in JobState:
            # Report 0 for states without jobs: otherwise an alert on such a state finds no series.
            jobs.labels(state, project).set(totals.jobs.get((state, project), 0))
    for one, values in ((metrics.GOODPUT, totals.goodput), (metrics.OLDEST_WAIT, totals.oldest_wait)):
        gauge = _gauge(one, registry)
        for project, value in values.items():
            gauge.labels(project).set(value)
    _gauge(metrics.BACKLOG, registry).set(totals.webhooks.backlog)
    webhooks = _gauge(metrics.WEBHOOKS, registry)
    for status in ("active", "failing", "disabled"):
        webhooks.labels(status).set(getattr(totals.webhooks, status))
    _set_run_gauges(totals.runs, registry)
    return registry


def _set_run_gauges(runs: Sequence[RunTotals], registry: CollectorRegistry) -> None:
    run_series: Mapping[Series, Callable[[RunTotals], float | None]] = {
        metrics.JOB_ATTEMPT: lambda run: run.attempt,
        metrics.JOB_STEP: lambda run: run.step,
        metrics.JOB_STEP_SECONDS: lambda run: run.step_seconds,
        metrics.JOB_TOKENS: lambda run: run.tokens_per_second,
        metrics.JOB_LOSS: lambda run: run.loss,
        metrics.JOB_DATA_WAIT: lambda run: run.data_wait,
        metrics.JOB_RESTARTS: lambda run: run.restarts,
        metrics.JOB_PROGRESS_AGE: lambda run: run.progress_age,
        metrics.JOB_CHECKPOINT_AGE: lambda run: run.checkpoint_age,
    }
    for one, value_of in run_series.items():
        gauge = _gauge(one, registry)
        for run in runs:
            if (value := value_of(run)) is not None:
                gauge.labels(run.project, run.job, run.name).set(value)
    waits = _gauge(metrics.JOB_WAITS, registry)
    for run in runs:
        if run.waits_for is not None:
            waits.labels(run.project, run.job, run.name, run.waits_for).set(1)
