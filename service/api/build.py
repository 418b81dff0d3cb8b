"""The FastAPI app: routers, middleware and error handlers over use cases that the caller has wired."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from fastapi import FastAPI

from service.api.authentication import Guard
from service.api.concurrency_limits import FairThreads
from service.api.group_commit import GroupCommit
from service.api.middleware import HostCheck, RequestIds, RequestMetrics
from service.api.openapi import OpenApiApp, operation_id
from service.api.problems import install_problems
from service.api.readiness import DatabaseProbe, ReadinessGate
from service.api.routes import (
    access,
    checkpoints,
    docs,
    doctor,
    health,
    jobs,
    metrics,
    nodes,
    runs,
    schemas,
    usage,
    webhooks,
)
from service.api.stranger_limit import StrangerLimit
from service.lifecycle.shutdown import Shutdown
from service.lifecycle.startup import DatabaseStartup, opened
from service.ports import ResultPages
from service.use_cases.checkpoints import CheckpointActions
from service.use_cases.doctor.doctor import Doctor
from service.use_cases.jobs.submit import Submitter
from service.use_cases.metrics import ServiceMetrics
from service.use_cases.runs.streams import ReadCache
from service.use_cases.webhooks.webhooks import Webhooks

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_SLOW_READS, _DIGESTS = 4, 1
"""Maximum numbers of concurrent verifications and run audits, and of digests: each hashes on all cores."""
_RESULT_READS = 4
"""Maximum number of concurrent reads of results, each in a process."""
_WAITING_PER_KEY = 32
"""Maximum number of these calls of a key that wait; twice as many of a project."""
_WEBHOOK_TESTS = 8
"""Maximum number of concurrent webhook tests; further ones wait."""


@dataclass(frozen=True)
class Parts:
    """The components of the HTTP side."""

    submitter: Submitter
    checkpoints: CheckpointActions
    guard: Guard
    service_metrics: ServiceMetrics
    webhooks: Webhooks
    doctor: Doctor
    results: ResultPages
    hosts: Sequence[str] = ()
    """Allowed Host header names, in addition to those of loopback."""
    lifespan: Lifespan | None = None
    startup: DatabaseStartup = field(default_factory=opened)
    shutdown: Shutdown = field(default_factory=Shutdown)
    checks: int = 32
    """Maximum number of specs checked concurrently; further ones wait."""


def build_api(parts: Parts) -> FastAPI:
    """Return the app with its routers, middleware and error handlers."""
    app = OpenApiApp(
        title="Trainshed",
        summary="Distributed training jobs that survive faults.",
        lifespan=parts.lifespan,
        generate_unique_id_function=operation_id,
        redirect_slashes=False,
        # Served by routes/docs.py: FastAPI builds each answer anew, and its pages load scripts from another site.
        openapi_url=None,
        separate_input_output_schemas=False,
    )
    put_state(app, parts)
    app.add_middleware(ReadinessGate, startup=parts.startup)
    app.add_middleware(HostCheck, hosts=(*LOOPBACK, *parts.hosts))
    app.add_middleware(StrangerLimit, guard=parts.guard)
    app.add_middleware(RequestMetrics, metrics=parts.service_metrics.metrics)
    app.add_middleware(RequestIds)
    install_problems(app)
    for module in (health, docs, schemas, jobs, runs, checkpoints, nodes, usage, access, metrics, webhooks, doctor):
        app.include_router(module.router)
    return app


def put_state(app: FastAPI, parts: Parts) -> None:
    """Set the objects that handlers read from `request.app.state`."""
    actions, guard = parts.checkpoints, parts.guard
    app.state.jobs, app.state.run_dirs, app.state.checkpoints = actions.jobs, actions.run_dirs, actions
    app.state.guard, app.state.access = guard, guard.access
    app.state.service_metrics = parts.service_metrics
    app.state.shutdown, app.state.startup, app.state.read_cache = parts.shutdown, parts.startup, ReadCache()
    app.state.database_probe = DatabaseProbe(actions.jobs.store.ping)
    app.state.doctor = parts.doctor
    app.state.checks = FairThreads(parts.checks)
    app.state.submitter, app.state.submit_cached = parts.submitter, GroupCommit(parts.submitter.submit_cached)
    app.state.slow_reads = FairThreads(_SLOW_READS, waiting_per_key=_WAITING_PER_KEY)
    app.state.result_pages = parts.results
    app.state.result_reads = FairThreads(_RESULT_READS, waiting_per_key=_WAITING_PER_KEY)
    app.state.digests = FairThreads(_DIGESTS, waiting_per_key=_WAITING_PER_KEY)
    tests = FairThreads(_WEBHOOK_TESTS, waiting_per_key=_WAITING_PER_KEY)
    app.state.webhooks, app.state.webhook_tests = parts.webhooks, tests
