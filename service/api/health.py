"""/healthz and /readyz: with the API's own description, the only calls without a key."""

from fastapi import APIRouter, Request, Response

from service.api.describe import Answers
from service.api.query import CHECKED
from service.api.schemas import Health
from service.use_cases import Jobs

router = APIRouter(tags=["health"], dependencies=[CHECKED])
_NOT_READY: Answers = {503: {"model": Health, "description": "Not ready, and why"}}


@router.get("/healthz")
def healthz() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/readyz", responses=_NOT_READY)
def readyz(request: Request, response: Response) -> Health:
    """The database answers, so that jobs can be taken; the cluster may still be on its way."""
    jobs: Jobs = request.app.state.jobs
    try:
        jobs.store.ping()
    except Exception:
        response.status_code = 503
        return Health(status="the database does not answer")
    return Health(status="ready")
