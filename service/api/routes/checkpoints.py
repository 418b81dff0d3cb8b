"""/jobs/{id}/checkpoints: list, verify, digest, pin, export."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from service.api.authentication import CallerIs, require_key
from service.api.bodies import parse_body, read_body
from service.api.concurrency_limits import FairThreads
from service.api.convert import checkpoint_out, digests_out, export_out
from service.api.openapi import Answers, json_body
from service.api.routes.jobs import claim_for
from service.api.schemas import CheckpointOut, Checkpoints, DigestsOut, ExportIn, ExportOut, Verified
from service.domain.jobs.job import Job
from service.use_cases.checkpoints import CheckpointActions
from train_loop.run_dir import ExportWish, wish_of

router = APIRouter(prefix="/jobs/{job_id}/checkpoints", tags=["checkpoints"], dependencies=[Depends(require_key)])
_DONE: Answers = {200: {"model": ExportOut, "description": "It is done already"}}
Step = Annotated[int, Path(ge=0, lt=10**8)]


async def actions_of(request: Request) -> CheckpointActions:
    """Return the use cases of the app that serves this request."""
    actions: CheckpointActions = request.app.state.checkpoints
    return actions


UseCases = Annotated[CheckpointActions, Depends(actions_of)]


@router.get("")
def checkpoints(caller: CallerIs, actions: UseCases, job_id: str) -> Checkpoints:
    """List committed checkpoints, oldest first."""
    return Checkpoints(data=[checkpoint_out(found) for found in actions.checkpoints(caller, job_id)])


@router.post("/{step}/verify")
async def verify(request: Request, caller: CallerIs, actions: UseCases, job_id: str, step: Step) -> Verified:
    """Read all files of a checkpoint and compare them with the checksums of its commit."""
    # Separate threads, shared by project: reading a large checkpoint takes long.
    threads: FairThreads = request.app.state.slow_reads
    claim = await claim_for(caller, actions.jobs, job_id)
    faults = await threads.run(request, claim, partial(actions.verify, caller, job_id, step))
    return Verified(step=step, ok=not faults, faults=faults)


@router.get("/{step}/digests")
async def digests(request: Request, caller: CallerIs, actions: UseCases, job_id: str, step: Step) -> DigestsOut:
    """Verify a checkpoint and compute the SHA-256 of each tensor, to compare it with that of another job."""
    threads: FairThreads = request.app.state.digests
    claim = await claim_for(caller, actions.jobs, job_id)
    return digests_out(await threads.run(request, claim, partial(actions.digests, caller, job_id, step)), step)


@router.post("/{step}/pin")
def pin(caller: CallerIs, actions: UseCases, job_id: str, step: Step) -> CheckpointOut:
    """Pin a checkpoint: retention never deletes it. Idempotent."""
    return checkpoint_out(actions.pin(caller, job_id, step))


@router.delete("/{step}/pin")
def unpin(caller: CallerIs, actions: UseCases, job_id: str, step: Step) -> CheckpointOut:
    """Unpin a checkpoint: retention may delete it again. Idempotent."""
    return checkpoint_out(actions.unpin(caller, job_id, step))


@router.post("/{step}/export", status_code=202, openapi_extra=json_body(ExportIn), responses=_DONE)
def export(
    caller: CallerIs,
    actions: UseCases,
    job_id: str,
    step: Step,
    body: Annotated[bytes, Depends(read_body)],
    response: Response,
) -> ExportOut:
    """Start the export of a checkpoint as a Hugging Face folder. Returns 200 if it is already done. Idempotent."""
    job = actions.jobs.find(caller, job_id)
    status = actions.export(caller, job_id, step, _wish(parse_body(ExportIn, body), job))
    response.status_code = 200 if status.state == "done" else 202
    return export_out(status, run_dir=job.run_dir)


@router.get("/{step}/export")
def exported(
    caller: CallerIs, actions: UseCases, job_id: str, step: Step, wish: Annotated[ExportIn, Query()]
) -> ExportOut:
    """Get the state and progress of an export."""
    job = actions.jobs.find(caller, job_id)
    return export_out(actions.exported(caller, job_id, step, _wish(wish, job)), run_dir=job.run_dir)


def _wish(body: ExportIn, job: Job) -> ExportWish:
    return wish_of(job.spec.run.model, dtype=body.dtype, weights=body.weights, form=body.form, include=body.include)
