"""The HTTP side as one FastAPI app, over use cases that somebody else wired."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from anyio import CapacityLimiter
from fastapi import FastAPI

from service.api import checkpoints, doctor, health, jobs, keys, runs, usage, watched
from service.api.guard import Guard, HostCheck, RequestIds
from service.api.problems import install_problems
from service.api.together import Together
from service.api.watched import Observed
from service.doctor import Doctor
from service.follow import Recent
from service.leaving import Leaving
from service.ledger import Ledger
from service.watch import Watching

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_CHECKS = 32
"""Specs that are checked at once; more of them wait."""


@dataclass(frozen=True)
class Parts:
    """What the HTTP side is made of."""

    ledger: Ledger
    guard: Guard
    watching: Watching
    doctor: Doctor
    hosts: Sequence[str] = ()
    """Names besides those of loopback by which callers may address the service."""
    lifespan: Lifespan | None = None
    leaving: Leaving = field(default_factory=Leaving)


def build_api(parts: Parts) -> FastAPI:
    """Routers, guards and error answers in one app."""
    app = FastAPI(
        title="Trainshed",
        summary="Distributed training jobs that survive faults.",
        lifespan=parts.lifespan,
        separate_input_output_schemas=False,
    )
    _put_state(app, parts)
    app.add_middleware(HostCheck, hosts=(*LOOPBACK, *parts.hosts))
    app.add_middleware(Observed, watch=parts.watching.watch)
    app.add_middleware(RequestIds)
    install_problems(app)
    for module in (health, jobs, runs, checkpoints, usage, keys, watched, doctor):
        app.include_router(module.router)
    return app


def _put_state(app: FastAPI, parts: Parts) -> None:
    """What handlers find in `request.app.state`."""
    ledger, guard = parts.ledger, parts.guard
    app.state.jobs, app.state.run_dirs, app.state.ledger = ledger.jobs, ledger.run_dirs, ledger
    app.state.guard, app.state.access = guard, guard.access
    app.state.watching = parts.watching
    app.state.doctor = parts.doctor
    app.state.leaving, app.state.recent = parts.leaving, Recent()
    app.state.checks, app.state.known = CapacityLimiter(_CHECKS), Together(ledger.jobs.submit_known)
