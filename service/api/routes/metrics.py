"""/metrics for Prometheus, and middleware that counts, times and logs every request."""

import time
from functools import partial
from typing import Annotated

import structlog
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.guard import ScraperIs, require_scraper
from service.api.readiness import DatabaseProbe
from service.ports import Metrics
from service.use_cases.metrics import ServiceMetrics

log = structlog.get_logger(__name__)
router = APIRouter(tags=["operations"], dependencies=[Depends(require_scraper)])
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_LONGEST_PATH = 256
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that probes and scrapers call every few seconds; logged at debug level."""


async def metrics_of(request: Request) -> ServiceMetrics:
    """Return the use case of the app that serves this request."""
    metrics: ServiceMetrics = request.app.state.service_metrics
    return metrics


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "the series"}},
)
async def metrics(
    request: Request, caller: ScraperIs, service: Annotated[ServiceMetrics, Depends(metrics_of)]
) -> Response:
    """Return Prometheus series of this process and all jobs. Needs the metrics key or viewer role in all projects."""
    database_probe: DatabaseProbe = request.app.state.database_probe
    text = await run_sync(partial(service.text, caller, database_up=await database_probe.is_up()))
    return Response(text, media_type=_TEXT)


class Observed:
    """Middleware that counts and logs each request once its response starts, by route template (ASGI).

    It is on the path of every request, so it must cost only a few microseconds.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self._outage = _EachSecond()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._tell(scope, status, time.perf_counter() - began)
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except Exception:
            if not status:
                self._tell(scope, 500, time.perf_counter() - began)
            raise

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        # Only known routes and methods become labels: made-up paths must not create new series.
        route = getattr(scope.get("route"), "path", "(none)")
        method = scope["method"] if scope["method"] in _METHODS else "(other)"
        self.metrics.answered(method, route, status, seconds)
        tell, left_out = log.debug if route in _QUIET else log.info, {}
        if scope["state"].get("outage"):
            if (count := self._outage.count()) is None:
                return
            left_out = {"left_out": count} if count else {}
        tell(
            "request",
            method=method,
            route=route,
            # The raw path: decoded, it may contain line breaks and imitate our log lines.
            path=scope["raw_path"][:_LONGEST_PATH].decode("latin-1"),
            status=status,
            ms=round(1000 * seconds, 1),
            key=scope["state"].get("key_id"),
            **left_out,
        )


class _EachSecond:
    """A limit of one log line per second: clients retry after a 503, and must not fill the log."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._left_out = 0

    def count(self) -> int | None:
        """Return the number of lines left out since the last one, or None to leave out this one too."""
        now = time.monotonic()
        if now - self._at < 1.0:
            self._left_out += 1
            return None
        self._at, left_out, self._left_out = now, self._left_out, 0
        return left_out
