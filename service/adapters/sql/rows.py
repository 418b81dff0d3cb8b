"""A job as a row of the jobs table, and back."""

from pydantic import TypeAdapter
from sqlalchemy import Row

from service.domain.job import Attempt, Cancel, Job, JobState
from train_loop.spec import JobSpec, dump

Value = str | int | float | None
_attempts = TypeAdapter(tuple[Attempt, ...])


def to_row(job: Job) -> dict[str, Value]:
    """Every column but the lease, which is not the job's own."""
    return {
        "id": job.id,
        "name": job.spec.name,
        "project": job.spec.project,
        "state": job.state.value,
        "reason": job.reason,
        "spec": dump(job.spec),
        "run_dir": job.run_dir,
        "created_at": job.created_at,
        "updated_at": job.updated_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "attempts": _attempts.dump_json(job.attempts).decode(),
        "next_attempt_at": job.next_attempt_at,
        "cancel_deadline": job.cancel.deadline if job.cancel else None,
        "cancel_checkpoint": int(job.cancel.checkpoint) if job.cancel else None,
        "version": job.version,
    }


def from_row(row: Row[tuple[object, ...]]) -> Job:
    """The job of a row that has every column of the table."""
    deadline = row.cancel_deadline
    return Job(
        id=row.id,
        spec=JobSpec.model_validate_json(row.spec),
        run_dir=row.run_dir,
        created_at=row.created_at,
        updated_at=row.updated_at,
        state=JobState(row.state),
        reason=row.reason,
        started_at=row.started_at,
        finished_at=row.finished_at,
        attempts=_attempts.validate_json(row.attempts),
        next_attempt_at=row.next_attempt_at,
        cancel=None if deadline is None else Cancel(deadline, bool(row.cancel_checkpoint)),
        version=row.version,
    )
