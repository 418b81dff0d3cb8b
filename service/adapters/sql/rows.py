"""A job as a row of the jobs table, and back."""

from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row

from service.domain.jobs.job import Attempt, Job, JobState, Lineage, StopRequest
from service.domain.jobs.reason import Reason
from service.domain.jobs.spec_text import spec_json
from service.domain.queue.entry import QueueEntry
from train_loop.spec import AnyJobSpec, ScalingSpec

Value = str | int | float | None
_attempts = TypeAdapter(tuple[Attempt, ...])
_times = TypeAdapter(dict[JobState, float])
_stop_request = TypeAdapter(StopRequest)
_reason = TypeAdapter(Reason)
_lineage = TypeAdapter(Lineage)
_sizes = TypeAdapter(tuple[int, ...])
_memory = TypeAdapter(dict[int, int])
_any_spec: TypeAdapter[AnyJobSpec] = TypeAdapter(AnyJobSpec)


def to_row(job: Job) -> dict[str, Value]:
    """Return all columns of a job, except its lease, which is not part of the job."""
    entry = QueueEntry.of(job)
    return {
        "id": job.id,
        "name": job.spec.name,
        "project": job.spec.project,
        "priority": job.spec.priority,
        "state": job.state.value,
        "reason": _reason.dump_json(job.reason).decode() if job.reason else None,
        "spec": spec_json(job.spec),
        "run_dir": job.run_dir,
        "created_at": job.created_at,
        "updated_at": job.updated_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "attempts": _attempts.dump_json(job.attempts).decode(),
        "next_attempt_at": job.next_attempt_at,
        "times": _times.dump_json(dict(job.times)).decode(),
        "wish": _stop_request.dump_json(job.stop_request).decode() if job.stop_request else None,
        "scaling": job.scaling.model_dump_json() if job.scaling else None,
        "parent": _lineage.dump_json(job.parent).decode() if job.parent else None,
        "sizes": _sizes.dump_json(job.sizes).decode(),
        "memory": _memory.dump_json(dict(job.memory)).decode(),
        "granted": job.granted,
        "size": entry.scaling.model_dump_json(),
        "holds": int(entry.holds),
        "waits": int(entry.waits),
        "since": entry.since,
        "ulysses": entry.group,
        "version": job.version,
    }


def from_row(row: Row[tuple[object, ...]]) -> Job:
    """Return the job of a row that has every column of the table."""
    return Job(
        id=row.id,
        spec=_spec(row.spec),
        run_dir=row.run_dir,
        created_at=row.created_at,
        updated_at=row.updated_at,
        state=JobState(row.state),
        reason=_reason.validate_json(row.reason) if row.reason else None,
        times=_times.validate_json(row.times),
        started_at=row.started_at,
        finished_at=row.finished_at,
        attempts=_attempts.validate_json(row.attempts),
        next_attempt_at=row.next_attempt_at,
        stop_request=_stop_request.validate_json(row.wish) if row.wish else None,
        scaling=_scaling(row.scaling) if row.scaling else None,
        sizes=_sizes.validate_json(row.sizes),
        memory=_memory.validate_json(row.memory),
        granted=row.granted,
        parent=_lineage.validate_json(row.parent) if row.parent else None,
        version=row.version,
    )


def queue_entry_of(row: Any) -> QueueEntry:
    """Return the entry of a row, without the validation of the whole spec."""
    return QueueEntry(
        id=row.id,
        project=row.project,
        priority=row.priority,
        state=JobState(row.state),
        scaling=_scaling(row.size),
        holds=bool(row.holds),
        waits=bool(row.waits),
        sizes=_sizes.validate_json(row.sizes),
        since=row.since,
        group=row.ulysses,
        memory=_memory.validate_json(row.memory),
    )


@lru_cache(maxsize=1024)
def _spec(text: str) -> AnyJobSpec:
    # Cached: a spec never changes, and the same jobs are read repeatedly.
    return _any_spec.validate_json(text)


@lru_cache(maxsize=4096)
def _scaling(text: str) -> ScalingSpec:
    return ScalingSpec.model_validate_json(text)
