"""The calls about jobs, their checkpoints and what they use."""

from collections.abc import Mapping, Sequence
from datetime import date
from types import NoneType
from uuid import uuid4

from pydantic import JsonValue

from service.api.ledger_schemas import CheckpointOut, Checkpoints, ExportIn, ExportOut, Verified
from service.api.plan_schemas import PlanOut
from service.api.schemas import CancelIn, CloneIn, JobOut, JobPage, PauseIn, ResumeIn
from service.api.usage_schemas import UsageDays
from service.client.call import Query, Sent, operation
from service.domain.job import JobState
from train_loop.spec import ScalingSpec

_CHECKPOINT = "/jobs/{job_id}/checkpoints/{step}"


class JobCalls:
    """/jobs, and what is below it but for what a run writes."""

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
        """Submit a job that goes on from a checkpoint of another one, with some of its spec different."""
        wish = CloneIn(from_checkpoint=from_checkpoint, overrides=dict(overrides or {}))
        return Sent({"job_id": job_id}, body=wish, headers=_once(idempotency_key))

    @operation(PlanOut, "POST", "/jobs/plan")
    def plan(self, spec: str | bytes) -> Sent:
        """What a spec comes to."""
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
        """A page of jobs, newest first."""
        wanted = {f"label.{key}": value for key, value in (labels or {}).items()}
        values = [state.value for state in states]
        among: Query = {"state": values, "project": project, "name": name, "id": id_prefix}
        return Sent(query={**among, **wanted, "after": after, "limit": limit})

    @operation(JobOut, "GET", "/jobs/{job_id}")
    def job(self, job_id: str) -> Sent:
        """One job."""
        return Sent({"job_id": job_id})

    @operation(JobOut, "POST", "/jobs/{job_id}/cancel")
    def cancel(self, job_id: str, *, grace_seconds: float | None = None, checkpoint: bool = True) -> Sent:
        """Ask for the end of a job."""
        return Sent({"job_id": job_id}, body=CancelIn(grace_seconds=grace_seconds, checkpoint=checkpoint))

    @operation(JobOut, "POST", "/jobs/{job_id}/pause")
    def pause(self, job_id: str, *, grace_seconds: float | None = None) -> Sent:
        """Ask a job to save and to leave the cluster until it is resumed."""
        return Sent({"job_id": job_id}, body=PauseIn(grace_seconds=grace_seconds))

    @operation(JobOut, "POST", "/jobs/{job_id}/resume")
    def resume(self, job_id: str, *, scaling: ScalingSpec | None = None) -> Sent:
        """Let a paused job go on, at another size if one is given."""
        return Sent({"job_id": job_id}, body=ResumeIn(scaling=scaling))

    @operation(NoneType, "DELETE", "/jobs/{job_id}")
    def delete(self, job_id: str) -> Sent:
        """Forget a job that has ended."""
        return Sent({"job_id": job_id})

    @operation(Checkpoints, "GET", "/jobs/{job_id}/checkpoints")
    def checkpoints(self, job_id: str) -> Sent:
        """The committed checkpoints, oldest first."""
        return Sent({"job_id": job_id})

    @operation(Verified, "POST", f"{_CHECKPOINT}/verify", seconds=None)
    def verify(self, job_id: str, step: int) -> Sent:
        """Read all of a checkpoint; large ones take their time."""
        return Sent({"job_id": job_id, "step": step})

    @operation(CheckpointOut, "POST", f"{_CHECKPOINT}/pin")
    def pin(self, job_id: str, step: int) -> Sent:
        """Keep a checkpoint whatever retention says."""
        return Sent({"job_id": job_id, "step": step})

    @operation(CheckpointOut, "DELETE", f"{_CHECKPOINT}/pin")
    def unpin(self, job_id: str, step: int) -> Sent:
        """Leave a checkpoint to retention again."""
        return Sent({"job_id": job_id, "step": step})

    @operation(ExportOut, "POST", f"{_CHECKPOINT}/export")
    def export(self, job_id: str, step: int, wish: ExportIn | None = None) -> Sent:
        """Begin to make a Hugging Face folder of a checkpoint."""
        return Sent({"job_id": job_id, "step": step}, body=wish or ExportIn())

    @operation(ExportOut, "GET", f"{_CHECKPOINT}/export")
    def exported(self, job_id: str, step: int, wish: ExportIn | None = None) -> Sent:
        """How far an export is."""
        return Sent({"job_id": job_id, "step": step}, (wish or ExportIn()).model_dump())

    @operation(UsageDays, "GET", "/usage")
    def usage(self, *, since: date | None = None, until: date | None = None, project: str | None = None) -> Sent:
        """Worker, CPU and GPU hours of each project on each day; of the last 30 days, unless told otherwise."""
        return Sent(query={"since": since, "until": until, "project": project})


def _once(key: str | None) -> dict[str, str]:
    """One key for all the tries of a call: however often it arrives, it creates one job."""
    return {"Idempotency-Key": key or uuid4().hex}
