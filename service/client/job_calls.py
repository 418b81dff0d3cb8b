"""API calls for jobs, their checkpoints and usage."""

from collections.abc import Mapping, Sequence
from datetime import date
from types import NoneType
from uuid import uuid4

from pydantic import JsonValue

from service.api.schemas import (
    CancelIn,
    CheckpointOut,
    Checkpoints,
    CloneIn,
    ExportIn,
    ExportOut,
    JobOut,
    JobPage,
    PauseIn,
    PlanOut,
    ResumeIn,
    UsageDays,
    Verified,
)
from service.client.call import Query, Sent, operation
from service.domain.job import JobState
from train_loop.spec import ScalingSpec

_CHECKPOINT = "/jobs/{job_id}/checkpoints/{step}"


class JobCalls:
    """Calls of /jobs, /jobs/{id}/checkpoints and /usage."""

    @operation(JobOut, "POST", "/jobs")
    def submit(self, spec: str | bytes, *, idempotency_key: str | None = None) -> Sent:
        """Submit a spec in YAML or JSON."""
        return Sent(body=spec, headers=_once(idempotency_key))

    @operation(JobOut, "POST", "/jobs/{job_id}/clone")
    def clone(
        self,
        job_id: str,
        *,
        from_checkpoint: int | None = None,
        overrides: Mapping[str, JsonValue] | None = None,
        idempotency_key: str | None = None,
    ) -> Sent:
        """Submit a job that starts from a checkpoint of another job, with changes to its spec."""
        wish = CloneIn(from_checkpoint=from_checkpoint, overrides=dict(overrides or {}))
        return Sent({"job_id": job_id}, body=wish, headers=_once(idempotency_key))

    @operation(PlanOut, "POST", "/jobs/plan")
    def plan(self, spec: str | bytes) -> Sent:
        """Return the plan of a spec."""
        return Sent(body=spec)

    @operation(JobPage, "GET", "/jobs")
    def jobs(
        self,
        *,
        states: Sequence[JobState] = (),
        project: str | None = None,
        name: str | None = None,
        id_prefix: str | None = None,
        labels: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> Sent:
        """Return a page of jobs, newest first."""
        wanted = {f"label.{key}": value for key, value in (labels or {}).items()}
        values = [state.value for state in states]
        among: Query = {"state": values, "project": project, "name": name, "id": id_prefix}
        return Sent(query={**among, **wanted, "after": after, "limit": limit})

    @operation(JobOut, "GET", "/jobs/{job_id}")
    def job(self, job_id: str) -> Sent:
        """Return a job."""
        return Sent({"job_id": job_id})

    @operation(JobOut, "POST", "/jobs/{job_id}/cancel")
    def cancel(self, job_id: str, *, grace_seconds: float | None = None, checkpoint: bool = True) -> Sent:
        """Request the cancellation of a job."""
        return Sent({"job_id": job_id}, body=CancelIn(grace_seconds=grace_seconds, checkpoint=checkpoint))

    @operation(JobOut, "POST", "/jobs/{job_id}/pause")
    def pause(self, job_id: str, *, grace_seconds: float | None = None) -> Sent:
        """Request a pause: commit a checkpoint and leave the cluster until the job is resumed."""
        return Sent({"job_id": job_id}, body=PauseIn(grace_seconds=grace_seconds))

    @operation(JobOut, "POST", "/jobs/{job_id}/resume")
    def resume(self, job_id: str, *, scaling: ScalingSpec | None = None) -> Sent:
        """Resume a paused job, with another size if one is given."""
        return Sent({"job_id": job_id}, body=ResumeIn(scaling=scaling))

    @operation(NoneType, "DELETE", "/jobs/{job_id}")
    def delete(self, job_id: str) -> Sent:
        """Delete a finished job."""
        return Sent({"job_id": job_id})

    @operation(Checkpoints, "GET", "/jobs/{job_id}/checkpoints")
    def checkpoints(self, job_id: str) -> Sent:
        """Return the committed checkpoints, oldest first."""
        return Sent({"job_id": job_id})

    @operation(Verified, "POST", f"{_CHECKPOINT}/verify", seconds=None)
    def verify(self, job_id: str, step: int) -> Sent:
        """Verify all files of a checkpoint. This takes long for large checkpoints."""
        return Sent({"job_id": job_id, "step": step})

    @operation(CheckpointOut, "POST", f"{_CHECKPOINT}/pin")
    def pin(self, job_id: str, step: int) -> Sent:
        """Pin a checkpoint: retention never deletes it."""
        return Sent({"job_id": job_id, "step": step})

    @operation(CheckpointOut, "DELETE", f"{_CHECKPOINT}/pin")
    def unpin(self, job_id: str, step: int) -> Sent:
        """Unpin a checkpoint: retention may delete it again."""
        return Sent({"job_id": job_id, "step": step})

    @operation(ExportOut, "POST", f"{_CHECKPOINT}/export")
    def export(self, job_id: str, step: int, wish: ExportIn | None = None) -> Sent:
        """Start the export of a checkpoint as a Hugging Face folder."""
        return Sent({"job_id": job_id, "step": step}, body=wish or ExportIn())

    @operation(ExportOut, "GET", f"{_CHECKPOINT}/export")
    def exported(self, job_id: str, step: int, wish: ExportIn | None = None) -> Sent:
        """Return the state and progress of an export."""
        return Sent({"job_id": job_id, "step": step}, (wish or ExportIn()).model_dump())

    @operation(UsageDays, "GET", "/usage")
    def usage(self, *, since: date | None = None, until: date | None = None, project: str | None = None) -> Sent:
        """Return worker, CPU and GPU hours by project and day, by default of the last 30 days."""
        return Sent(query={"since": since, "until": until, "project": project})


def _once(key: str | None) -> dict[str, str]:
    """Return an Idempotency-Key header. All retries of a call send the same key, so that it creates one job."""
    return {"Idempotency-Key": key or uuid4().hex}
