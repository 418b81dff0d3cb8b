"""/jobs: submit, clone, plan, list, get, pause, resume, cancel, delete."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar, TypeVarTuple

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response

from service.api.convert import job_out, plan_out
from service.api.fair_share import Checks
from service.api.group_commit import GroupCommit
from service.api.guard import CallerIs, parse_body, read_body, require_key
from service.api.openapi import LOCATION, SPEC_BODY, Answers, json_body
from service.api.query import ANY_CASE
from service.api.schemas import CancelIn, CloneIn, JobOut, JobPage, PauseIn, PlanOut, ResumeIn
from service.domain.access.roles import Principal
from service.domain.jobs.job import JobState
from service.ports import IdempotencyKey, JobQuery
from service.use_cases.jobs.jobs import Jobs, JobView
from service.use_cases.jobs.planning import PlanView
from service.use_cases.jobs.specs import positions_in

T = TypeVar("T")
Given = TypeVarTuple("Given")
_OTHERS = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"]
"""All methods except POST."""
router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=[Depends(require_key)])
_NEW: Answers = {
    201: LOCATION,
    200: LOCATION | {"model": JobOut, "description": "Its Idempotency-Key was known: the same job"},
}
Body = Annotated[bytes, Depends(read_body)]
IdempotencyHeader = Annotated[str | None, Header(min_length=1, max_length=255)]
_ID_PREFIX = "^([Jj][Oo][Bb]-)?[0-9A-Za-z]{1,26}$"


async def jobs_of(request: Request, caller: CallerIs) -> Jobs:
    """Return the use cases for the caller of this request."""
    jobs: Jobs = request.app.state.jobs
    return jobs.of(caller)


UseCases = Annotated[Jobs, Depends(jobs_of)]


@dataclass(frozen=True)
class Asked:
    """A request with a spec, or changes to one, to check."""

    jobs: Jobs
    body: bytes
    checks: Checks
    known: GroupCommit[tuple[Principal, bytes, IdempotencyKey | None], JobView | None]

    @classmethod
    async def read(cls, request: Request, caller: CallerIs) -> "Asked":
        """Return the body, together with the use cases and thread limits of the app.

        Raises Forbidden, JobNotFound, BodyTooLarge.
        """
        state = request.app.state
        jobs: Jobs = state.jobs.of(caller)
        # Checked before the body is read: a caller without write access must cost nothing.
        if not caller.edits:
            if job_id := request.path_params.get("job_id"):
                await run_sync(jobs.find, job_id)
            jobs.must_edit()
        return cls(jobs, await read_body(request), state.checks, state.known)

    async def submit(self, once: IdempotencyKey | None) -> tuple[JobView, bool]:
        """Submit as `Jobs.submit` does. If all checks are cached, store the job together with concurrent ones."""
        view = await self.known((self.jobs.caller, self.body, once))
        return (view, True) if view is not None else await self.call(self._submit, once)

    async def plan(self) -> PlanView:
        """Plan as `Jobs.plan` does."""
        return await self.call(self._plan)

    def _submit(self, once: IdempotencyKey | None) -> tuple[JobView, bool]:
        with positions_in(self.body):
            return self.jobs.submit(self.body, once)

    def _plan(self) -> PlanView:
        with positions_in(self.body):
            return self.jobs.plan(self.body)

    async def call(self, use_case: Callable[[*Given], T], *given: *Given) -> T:
        """Return the result of the use case. It runs in separate threads, because checks may take long."""
        return await self.checks.run(self.jobs.caller, use_case, *given)


ToCheck = Annotated[Asked, Depends(Asked.read)]


@router.post("", status_code=201, openapi_extra=SPEC_BODY, responses=_NEW)
async def submit(asked: ToCheck, response: Response, idempotency_key: IdempotencyHeader = None) -> JobOut:
    """Submit a job and store it durably. The same Idempotency-Key and body return the same job, with 200."""
    return _answer(asked.jobs, response, *await asked.submit(_once(asked, idempotency_key, asked.body)))


@router.post("/{job_id}/clone", status_code=201, openapi_extra=json_body(CloneIn), responses=_NEW)
async def clone(asked: ToCheck, job_id: str, response: Response, idempotency_key: IdempotencyHeader = None) -> JobOut:
    """Submit a job that starts from a checkpoint of this one, with changes to its spec. Otherwise like submit."""
    wish, once = (
        parse_body(CloneIn, asked.body),
        _once(asked, idempotency_key, f"clone {job_id} ".encode() + asked.body),
    )
    view, new = await asked.call(asked.jobs.clone, job_id, wish.from_checkpoint, wish.overrides, once)
    return _answer(asked.jobs, response, view, new)


def _once(asked: Asked, key: str | None, body: bytes) -> IdempotencyKey | None:
    return IdempotencyKey(key, hashlib.sha256(body).hexdigest(), asked.jobs.caller.scope) if key else None


def _answer(jobs: Jobs, response: Response, view: JobView, new: bool) -> JobOut:
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/jobs/{view.job.id}"
    return job_out(view, now=jobs.clock())


@router.post("/plan", openapi_extra=SPEC_BODY)
async def plan(asked: ToCheck) -> PlanOut:
    """Check a spec as submit does and return its plan. Nothing is stored."""
    return plan_out(await asked.plan())


@router.api_route("/plan", methods=_OTHERS, include_in_schema=False)
async def no_job() -> None:
    """Return 405: `plan` is an operation, not a job id."""
    raise HTTPException(405, "no job has this name; POST plans a spec", {"Allow": "POST"})


async def job_query(
    request: Request,
    state: Annotated[
        list[Annotated[JobState, ANY_CASE]] | None, Query(description="only these states, case-insensitive")
    ] = None,
    project: str | None = None,
    name: str | None = None,
    id: Annotated[str | None, Query(pattern=_ID_PREFIX, description="prefix of the id, with or without job-")] = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    label: Annotated[
        str | None, Query(alias="label.KEY", description="value of label KEY; with several, all must match")
    ] = None,
) -> JobQuery:
    """Return the filters of a list. A job must match all `label.KEY=VALUE` filters."""
    given = request.query_params.multi_items()
    labels = tuple((key.removeprefix("label."), value) for key, value in given if key.startswith("label."))
    projects = None if project is None else frozenset({project})
    prefix = None if id is None else f"job-{id.lower().removeprefix('job-')}"
    return JobQuery(tuple(state or ()), projects, name, labels, prefix, after, limit)


@router.get("")
def list_jobs(jobs: UseCases, query: Annotated[JobQuery, Depends(job_query)]) -> JobPage:
    """List jobs, newest first. Pass `next` as `?after=` to get the next page."""
    views, has_more = jobs.page(query)
    data = [job_out(view, now=jobs.clock()) for view in views]
    return JobPage(data=data, has_more=has_more, next=data[-1].id if has_more else None)


@router.get("/{job_id}")
def get(jobs: UseCases, job_id: str) -> JobOut:
    """Get a job."""
    return job_out(jobs.get(job_id), now=jobs.clock())


@router.delete("/{job_id}", status_code=204)
def delete(jobs: UseCases, job_id: str) -> None:
    """Delete a finished job. Its run directory is kept."""
    jobs.delete(job_id)


@router.post("/{job_id}/pause", openapi_extra=json_body(PauseIn))
def pause(jobs: UseCases, job_id: str, body: Body) -> JobOut:
    """Pause a job: commit a checkpoint and leave the cluster until it is resumed. Idempotent."""
    wish = parse_body(PauseIn, body)
    return job_out(jobs.pause(job_id, grace_seconds=wish.grace_seconds), now=jobs.clock())


@router.post("/{job_id}/resume", openapi_extra=json_body(ResumeIn))
async def resume(asked: ToCheck, job_id: str) -> JobOut:
    """Resume a paused job, with another size if one is given. Idempotent."""
    view = await asked.call(asked.jobs.resume, job_id, parse_body(ResumeIn, asked.body).scaling)
    return job_out(view, now=asked.jobs.clock())


@router.post("/{job_id}/cancel", openapi_extra=json_body(CancelIn))
def cancel(jobs: UseCases, job_id: str, body: Body) -> JobOut:
    """Cancel a job, by default after a last checkpoint. Idempotent."""
    wish = parse_body(CancelIn, body)
    view = jobs.cancel(job_id, grace_seconds=wish.grace_seconds, checkpoint=wish.checkpoint)
    return job_out(view, now=jobs.clock())
