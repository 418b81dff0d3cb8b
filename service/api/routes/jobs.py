"""/jobs: submit, clone, plan, list, get, pause, resume, cancel, delete."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar, TypeVarTuple

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response

from service.api.authentication import CallerIs, caller_of, require_key
from service.api.bodies import parse_body, read_body
from service.api.concurrency_limits import Claim, FairThreads
from service.api.convert import job_out
from service.api.convert_plan import plan_out
from service.api.group_commit import GroupCommit
from service.api.openapi import LOCATION, SPEC_BODY, Answers, json_body
from service.api.query_parameters import ANY_CASE
from service.api.schemas import CancelIn, CloneIn, JobOut, JobPage, PauseIn, PlanOut, ResumeIn
from service.domain.access.permissions import require_any_editor
from service.domain.access.roles import Principal
from service.domain.jobs.job import JobState
from service.domain.jobs.spec_text import spec_json
from service.ports import Cancellation, IdempotencyKey, JobQuery
from service.use_cases.jobs.jobs import Jobs
from service.use_cases.jobs.outlook import DeviceQuestion
from service.use_cases.jobs.planning import PlanView
from service.use_cases.jobs.specs import positions_in
from service.use_cases.jobs.submit import JobRequest, Submitted, Submitter

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
_CURSOR = "^job-[0-9a-z]{1,26}$"
_ID_PREFIX = "^([Jj][Oo][Bb]-)?[0-9A-Za-z]{1,26}$"


async def jobs_of(request: Request) -> Jobs:
    """Return the use cases of the app that serves this request."""
    jobs: Jobs = request.app.state.jobs
    return jobs


UseCases = Annotated[Jobs, Depends(jobs_of)]


async def claim_for(caller: Principal, jobs: Jobs, job_id: str) -> Claim:
    """Return the claim of a caller to a slot for a job: it counts for the job's project. Raises JobNotFound."""
    job = await run_sync(jobs.find, caller, job_id)
    return Claim(caller.id, job.spec.project)


@dataclass(frozen=True)
class SpecRequest:
    """A request with a spec, or changes to one. Its checks may take long, so they run in separate threads."""

    caller: Principal
    body: bytes
    jobs: Jobs
    submitter: Submitter
    submit_cached: GroupCommit[JobRequest, Submitted]
    checks: FairThreads
    request: Request

    @classmethod
    async def read(cls, request: Request) -> "SpecRequest":
        """Return the body, together with the use cases and thread limits of the app.

        Not a dependency of FastAPI, which would take longer than all checks of a known spec. Raises Forbidden,
        JobNotFound, BodyTooLarge.
        """
        state, caller = request.app.state, caller_of(request)
        # Checked before the body is read: a caller without write access must cost nothing.
        if not caller.edits:
            if job_id := request.path_params.get("job_id"):
                await run_sync(state.jobs.find, caller, job_id)
            require_any_editor(caller)
        body = await read_body(request)
        return cls(caller, body, state.jobs, state.submitter, state.submit_cached, state.checks, request)

    def key(self, given: str | None, *, prefix: str = "") -> IdempotencyKey | None:
        """Return the Idempotency-Key of this request. `prefix` distinguishes it from other calls with the same body."""
        if not given:
            return None
        return IdempotencyKey(given, hashlib.sha256(prefix.encode() + self.body).hexdigest(), self.caller.scope)

    async def submit(self, given_key: str | None) -> Submitted:
        """Submit the spec. If all its checks are cached, its job is stored together with concurrent ones."""
        request = JobRequest(self.caller, self.body, self.key(given_key))
        stored = await self.submit_cached(request)
        return stored if stored is not None else await self.check(self._submit, request)

    async def plan(self, question: DeviceQuestion) -> PlanView:
        """Plan the spec. The plan ends if its client disconnects; a submission does not."""
        return await self.checks.run(self.request, Claim.of(self.caller), partial(self._plan, question))

    def _submit(self, request: JobRequest) -> Submitted:
        with positions_in(self.body):
            return self.submitter.submit(request)

    def _plan(self, question: DeviceQuestion, cancellation: Cancellation) -> PlanView:
        with positions_in(self.body):
            return self.submitter.plan(self.caller, self.body, cancellation, question)

    async def check(self, use_case: Callable[[*Given], T], *given: *Given) -> T:
        """Return the result of a use case that checks a spec. It runs in the threads for checks."""
        return await self.checks.run(self.request, Claim.of(self.caller), lambda _: use_case(*given))


@router.post("", status_code=201, openapi_extra=SPEC_BODY, responses=_NEW, response_model=JobOut)
async def submit(request: Request, idempotency_key: IdempotencyHeader = None) -> Response:
    """Submit a job and store it durably. The same Idempotency-Key and body return the same job, with 200."""
    given = await SpecRequest.read(request)
    return _answer(given, await given.submit(idempotency_key))


@router.post(
    "/{job_id}/clone", status_code=201, openapi_extra=json_body(CloneIn), responses=_NEW, response_model=JobOut
)
async def clone(request: Request, job_id: str, idempotency_key: IdempotencyHeader = None) -> Response:
    """Submit a job that starts from a checkpoint of this one, with changes to its spec. Otherwise like submit."""
    given = await SpecRequest.read(request)
    wanted = parse_body(CloneIn, given.body)
    call = partial(
        given.submitter.clone,
        given.caller,
        job_id,
        step=wanted.from_checkpoint,
        overrides=wanted.overrides,
        key=given.key(idempotency_key, prefix=f"clone {job_id} "),
    )
    return _answer(given, await given.check(call))


def _answer(given: SpecRequest, submitted: Submitted) -> Response:
    job = submitted.view.job
    content = job_out(submitted.view, now=given.jobs.clock()).to_json(spec_json(job.spec))
    place = {"Location": f"/jobs/{job.id}"}
    return Response(content, 201 if submitted.created else 200, place, media_type="application/json")


@router.post("/plan", openapi_extra=SPEC_BODY)
async def plan(
    request: Request,
    device: Annotated[
        str | None, Query(max_length=64, description="GPU to plan for, as h100-80g; default: that of the cluster")
    ] = None,
    suggest: Annotated[
        bool, Query(description="list changes with which the plan fits the GPU, cheapest first")
    ] = False,
) -> PlanOut:
    """Check a spec as submit does and return its plan. Nothing is stored.

    For a GPU, the plan compares memory and forecasts throughput. With `device`, the plan need not fit the cluster.
    """
    given = await SpecRequest.read(request)
    return plan_out(await given.plan(DeviceQuestion(device, suggest)))


@router.api_route("/plan", methods=_OTHERS, include_in_schema=False)
async def no_job(device: str | None = None, suggest: str | None = None) -> None:
    """Return 405: `plan` is an operation, not a job id; the parameters of its query are not refused."""
    raise HTTPException(405, "no job has this name; POST plans a spec", {"Allow": "POST"})


async def job_query(
    request: Request,
    state: Annotated[
        list[Annotated[JobState, ANY_CASE]] | None, Query(description="only these states, case-insensitive")
    ] = None,
    project: str | None = None,
    name: str | None = None,
    id: Annotated[str | None, Query(pattern=_ID_PREFIX, description="prefix of the id, with or without job-")] = None,
    after: Annotated[str | None, Query(pattern=_CURSOR, description="`next` of the previous page")] = None,
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
def list_jobs(caller: CallerIs, jobs: UseCases, query: Annotated[JobQuery, Depends(job_query)]) -> JobPage:
    """List jobs, newest first. Pass `next` as `?after=` to get the next page."""
    views, has_more = jobs.page(caller, query)
    data = [job_out(view, now=jobs.clock()) for view in views]
    return JobPage(data=data, has_more=has_more, next=data[-1].id if has_more else None)


@router.get("/{job_id}")
def get(caller: CallerIs, jobs: UseCases, job_id: str) -> JobOut:
    """Get a job."""
    return job_out(jobs.get(caller, job_id), now=jobs.clock())


@router.delete("/{job_id}", status_code=204)
def delete(caller: CallerIs, jobs: UseCases, job_id: str) -> None:
    """Delete a finished job. Its run directory is kept."""
    jobs.delete(caller, job_id)


@router.post("/{job_id}/pause", openapi_extra=json_body(PauseIn))
def pause(caller: CallerIs, jobs: UseCases, job_id: str, body: Body) -> JobOut:
    """Pause a job: commit a checkpoint and leave the cluster until it is resumed. Idempotent."""
    wanted = parse_body(PauseIn, body)
    return job_out(jobs.pause(caller, job_id, grace_seconds=wanted.grace_seconds), now=jobs.clock())


@router.post("/{job_id}/resume", openapi_extra=json_body(ResumeIn))
async def resume(request: Request, job_id: str) -> JobOut:
    """Resume a paused job, with another size if one is given. Idempotent."""
    given = await SpecRequest.read(request)
    scaling = parse_body(ResumeIn, given.body).scaling
    view = await given.check(given.jobs.resume, given.caller, job_id, scaling)
    return job_out(view, now=given.jobs.clock())


@router.post("/{job_id}/cancel", openapi_extra=json_body(CancelIn))
def cancel(caller: CallerIs, jobs: UseCases, job_id: str, body: Body) -> JobOut:
    """Cancel a job, by default after a last checkpoint. Idempotent."""
    wanted = parse_body(CancelIn, body)
    view = jobs.cancel(caller, job_id, grace_seconds=wanted.grace_seconds, checkpoint=wanted.checkpoint)
    return job_out(view, now=jobs.clock())
