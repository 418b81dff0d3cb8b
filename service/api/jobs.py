"""/jobs: submit, clone, plan, list, get, pause, resume, cancel, delete."""

import hashlib
from collections.abc import Callable
from typing import Annotated, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from service.api.guard import parse_body, read_body, require_key
from service.api.plan_schemas import PlanOut
from service.api.schemas import CancelIn, CloneIn, JobOut, JobPage, PauseIn, ResumeIn
from service.domain.job import JobState
from service.ports import JobQuery, Once
from service.use_cases import Jobs, JobView

T = TypeVar("T")
router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=[Depends(require_key)])
_SPEC = {"schema": {"$ref": "#/components/schemas/JobSpec"}}
_SPEC_BODY = {"requestBody": {"required": True, "content": {"application/json": _SPEC, "application/yaml": _SPEC}}}
_CLONE_BODY, _PAUSE_BODY, _RESUME_BODY, _CANCEL_BODY = (
    {"requestBody": {"content": {"application/json": {"schema": body.model_json_schema()}}}}
    for body in (CloneIn, PauseIn, ResumeIn, CancelIn)
)
Body = Annotated[bytes, Depends(read_body)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


async def jobs_of(request: Request) -> Jobs:
    """The use cases of the app that serves this request."""
    jobs: Jobs = request.app.state.jobs
    return jobs


UseCases = Annotated[Jobs, Depends(jobs_of)]


class InThreads:
    """Calls in threads of their own: checks may take as long as storage does, and other answers are not to wait."""

    def __init__(self, threads: int) -> None:
        self._limiter = CapacityLimiter(threads)

    async def __call__(self, call: Callable[..., T], *arguments: object) -> T:
        """What the call returns."""
        return await run_sync(call, *arguments, limiter=self._limiter)


async def checks_of(request: Request) -> InThreads:
    """Where the app that serves this request checks what it is sent."""
    checks: InThreads = request.app.state.checks
    return checks


Checks = Annotated[InThreads, Depends(checks_of)]


@router.post("", status_code=201, openapi_extra=_SPEC_BODY)
async def submit(
    jobs: UseCases, checks: Checks, body: Body, response: Response, idempotency_key: IdempotencyKey = None
) -> JobOut:
    """Store a job durably; the same Idempotency-Key and body give the same job again, with 200."""
    return _answer(jobs, response, *await checks(jobs.submit, body, _once(idempotency_key, body)))


@router.post("/{job_id}/clone", status_code=201, openapi_extra=_CLONE_BODY)
async def clone(
    jobs: UseCases, checks: Checks, job_id: str, body: Body, response: Response, idempotency_key: IdempotencyKey = None
) -> JobOut:
    """Store a job that goes on from a checkpoint of this one, with some of its spec different; else as submit."""
    wish, once = parse_body(CloneIn, body), _once(idempotency_key, f"clone {job_id} ".encode() + body)
    return _answer(jobs, response, *await checks(jobs.clone, job_id, wish.from_checkpoint, wish.overrides, once))


def _once(key: str | None, asked: bytes) -> Once | None:
    return Once(key, hashlib.sha256(asked).hexdigest()) if key else None


def _answer(jobs: Jobs, response: Response, view: JobView, new: bool) -> JobOut:
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/jobs/{view.job.id}"
    return JobOut.of(view, now=jobs.clock())


@router.post("/plan", openapi_extra=_SPEC_BODY)
async def plan(jobs: UseCases, checks: Checks, body: Body) -> PlanOut:
    """The same checks as submit; nothing is stored."""
    return PlanOut.of(await checks(jobs.plan, body))


async def job_query(
    request: Request,
    state: Annotated[list[JobState] | None, Query()] = None,
    project: str | None = None,
    name: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JobQuery:
    """The filters; `label.k=v` asks for a label, several of them for all."""
    given = request.query_params.multi_items()
    labels = tuple((key.removeprefix("label."), value) for key, value in given if key.startswith("label."))
    return JobQuery(tuple(state or ()), project, name, labels, after, limit)


@router.get("")
def list_jobs(jobs: UseCases, query: Annotated[JobQuery, Depends(job_query)]) -> JobPage:
    """Jobs, newest first; `next` goes into `?after=`."""
    views, has_more = jobs.page(query)
    data = [JobOut.of(view, now=jobs.clock()) for view in views]
    return JobPage(data=data, has_more=has_more, next=data[-1].id if has_more else None)


@router.get("/{job_id}")
def get(jobs: UseCases, job_id: str) -> JobOut:
    """One job."""
    return JobOut.of(jobs.get(job_id), now=jobs.clock())


@router.delete("/{job_id}", status_code=204)
def delete(jobs: UseCases, job_id: str) -> None:
    """Forget a job that has ended; its run directory stays where it is."""
    jobs.delete(job_id)


@router.post("/{job_id}/pause", openapi_extra=_PAUSE_BODY)
def pause(jobs: UseCases, job_id: str, body: Body) -> JobOut:
    """Commit a checkpoint and leave the cluster until the job is resumed; repeatable."""
    wish = parse_body(PauseIn, body)
    return JobOut.of(jobs.pause(job_id, grace_seconds=wish.grace_seconds), now=jobs.clock())


@router.post("/{job_id}/resume", openapi_extra=_RESUME_BODY)
async def resume(jobs: UseCases, checks: Checks, job_id: str, body: Body) -> JobOut:
    """Let a paused job go on, at another size if one is given; repeatable."""
    view = await checks(jobs.resume, job_id, parse_body(ResumeIn, body).scaling)
    return JobOut.of(view, now=jobs.clock())


@router.post("/{job_id}/cancel", openapi_extra=_CANCEL_BODY)
def cancel(jobs: UseCases, job_id: str, body: Body) -> JobOut:
    """End the job, by default with a last checkpoint; repeatable."""
    wish = parse_body(CancelIn, body)
    view = jobs.cancel(job_id, grace_seconds=wish.grace_seconds, checkpoint=wish.checkpoint)
    return JobOut.of(view, now=jobs.clock())
