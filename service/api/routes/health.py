"""/healthz and /readyz: besides the API description and the schema of specs, the only calls without a key."""

from fastapi import APIRouter, Request

from service.api.query_parameters import CHECKED
from service.api.readiness import DatabaseProbe
from service.api.schemas import Health
from service.errors import ClusterStarting, GoingAway, PreflightStarting
from service.lifecycle.startup import DatabaseStartup
from service.use_cases.jobs.jobs import Jobs

router = APIRouter(tags=["health"], dependencies=[CHECKED])


@router.get("/healthz")
async def healthz() -> Health:
    """Report that the process is alive, even if all threads wait for an unresponsive database."""
    return Health(status="ok")


@router.get("/readyz")
async def readyz(request: Request) -> Health:
    """Return 200 if the service accepts jobs: the database accepts writes, and specs can be checked and planned."""
    database_probe: DatabaseProbe = request.app.state.database_probe
    startup: DatabaseStartup = request.app.state.startup
    if startup.trouble is not None:
        raise startup.trouble
    if request.app.state.shutdown.is_set():
        raise GoingAway("the service is ending; ask another one, or this one once it was started again")
    if (trouble := await database_probe.trouble()) is not None:
        # Probes expect 503; 507 is for callers that write.
        trouble.status = 503
        raise trouble
    jobs: Jobs = request.app.state.jobs
    if (why := jobs.preflight.trouble()) is not None:
        raise PreflightStarting(why)
    if jobs.first_view.pending:
        raise ClusterStarting
    return Health(status="ready")
