"""/metrics for Prometheus."""

from functools import partial
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response

from service.api.authentication import ScraperIs, require_scraper
from service.api.readiness import DatabaseProbe
from service.use_cases.metrics import ServiceMetrics

router = APIRouter(tags=["operations"], dependencies=[Depends(require_scraper)])
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


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
