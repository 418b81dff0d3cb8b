"""The HTTP side as one FastAPI app, over use cases that somebody else wired."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from anyio import CapacityLimiter
from fastapi import FastAPI

from service.api import checkpoints, health, jobs, keys, runs, usage
from service.api.guard import Guard, HostCheck, RequestIds
from service.api.problems import install_problems
from service.api.together import Together
from service.follow import Recent
from service.ledger import Ledger

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_CHECKS = 32
"""Specs that are checked at once; more of them wait."""


def build_api(ledger: Ledger, guard: Guard, *, hosts: Sequence[str] = (), lifespan: Lifespan | None = None) -> FastAPI:
    """Routers, guards and error answers in one app."""
    app = FastAPI(
        title="Trainshed",
        summary="Distributed training jobs that survive faults.",
        lifespan=lifespan,
        separate_input_output_schemas=False,
    )
    app.state.jobs, app.state.run_dirs = ledger.jobs, ledger.run_dirs
    app.state.ledger, app.state.guard, app.state.access = ledger, guard, guard.access
    # Set when the service is to end: nobody may wait for those who follow a job.
    app.state.leaving = threading.Event()
    app.state.recent = Recent()
    app.state.checks, app.state.known = CapacityLimiter(_CHECKS), Together(ledger.jobs.submit_known)
    app.add_middleware(HostCheck, hosts=(*LOOPBACK, *hosts))
    app.add_middleware(RequestIds)
    install_problems(app)
    for module in (health, jobs, runs, checkpoints, usage, keys):
        app.include_router(module.router)
    return app
