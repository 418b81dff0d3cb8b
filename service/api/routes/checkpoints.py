"""/jobs/{id}/checkpoints: list, verify, pin, export."""

from typing import Annotated

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from service.api.convert import checkpoint_out, export_out
from service.api.guard import CallerIs, parse_body, read_body, require_key
from service.api.openapi import Answers, json_body
from service.api.schemas import CheckpointOut, Checkpoints, ExportIn, ExportOut, Verified
from service.domain.jobs.job import Job
from service.use_cases.checkpoints import CheckpointActions
from train_loop.run_dir import ExportWish

router = APIRouter(prefix="/jobs/{job_id}/checkpoints", tags=["checkpoints"], dependencies=[Depends(require_key)])
_DONE: Answers = {200: {"model": ExportOut, "description": "It is done already"}}
Step = Annotated[int, Path(ge=0, lt=10**8)]


async def ledger_of(request: Request, caller: CallerIs) -> CheckpointActions:
    """Return the use cases for the caller of this request."""
    ledger: CheckpointActions = request.app.state.ledger
    return ledger.of(caller)


UseCases = Annotated[CheckpointActions, Depends(ledger_of)]


@router.get("")
def checkpoints(ledger: UseCases, job_id: str) -> Checkpoints:
    """List committed checkpoints, oldest first."""
    return Checkpoints(data=[checkpoint_out(found) for found in ledger.checkpoints(job_id)])


@router.post("/{step}/verify")
async def verify(request: Request, ledger: UseCases, job_id: str, step: Step) -> Verified:
    """Read all files of a checkpoint and compare them with the checksums of its commit."""
    # Use separate threads: reading a large checkpoint takes long.
    threads: CapacityLimiter = request.app.state.verifying
    faults = await run_sync(ledger.verify, job_id, step, limiter=threads)
    return Verified(step=step, ok=not faults, faults=faults)


@router.post("/{step}/pin")
def pin(ledger: UseCases, job_id: str, step: Step) -> CheckpointOut:
    """Pin a checkpoint: retention never deletes it. Idempotent."""
    return checkpoint_out(ledger.pin(job_id, step))


@router.delete("/{step}/pin")
def unpin(ledger: UseCases, job_id: str, step: Step) -> CheckpointOut:
    """Unpin a checkpoint: retention may delete it again. Idempotent."""
    return checkpoint_out(ledger.unpin(job_id, step))


@router.post("/{step}/export", status_code=202, openapi_extra=json_body(ExportIn), responses=_DONE)
def export(
    ledger: UseCases, job_id: str, step: Step, body: Annotated[bytes, Depends(read_body)], response: Response
) -> ExportOut:
    """Start the export of a checkpoint as a Hugging Face folder. Returns 200 if it is already done. Idempotent."""
    job = ledger.jobs.find(job_id)
    status = ledger.export(job_id, step, _wish(parse_body(ExportIn, body), job))
    response.status_code = 200 if status.state == "done" else 202
    return export_out(status, run_dir=job.run_dir)


@router.get("/{step}/export")
def exported(ledger: UseCases, job_id: str, step: Step, wish: Annotated[ExportIn, Query()]) -> ExportOut:
    """Get the state and progress of an export."""
    job = ledger.jobs.find(job_id)
    return export_out(ledger.exported(job_id, step, _wish(wish, job)), run_dir=job.run_dir)


def _wish(asked: ExportIn, job: Job) -> ExportWish:
    return ExportWish(dtype=asked.dtype or job.spec.model.dtype, weights=asked.weights)
