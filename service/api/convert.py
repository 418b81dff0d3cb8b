"""Conversion of the domain and of use case results to response models."""

from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TypeVar

from service.api.schemas import (
    AttemptOut,
    CheckpointOut,
    DeedOut,
    DeliveryOut,
    DigestsOut,
    ExaminationOut,
    ExportOut,
    FindingOut,
    Findings,
    JobOut,
    KeyOut,
    LineageOut,
    LostWork,
    NewWebhook,
    NodeFailure,
    NodeOut,
    ProgressOut,
    ReasonOut,
    RunAuditOut,
    TensorDigestOut,
    TrialOut,
    UsageDays,
    UsageOut,
    WebhookOut,
)
from service.domain.access.roles import AuditEntry, Key, Principal
from service.domain.jobs.job import Attempt, JobState
from service.domain.jobs.reason import Reason
from service.domain.jobs.usage import UsageByDay, usage_of
from service.domain.runs.audit_report import Difference, Duplicate, Found, Gap, LossChange, Repeat, RunAudit, Unseen
from service.domain.webhooks.delivery import Answer, Delivery, Webhook
from service.ports import Checkpoint, Digests, Progress
from service.use_cases.doctor.doctor import DoctorReport
from service.use_cases.doctor.nodes import NodeView
from service.use_cases.jobs.jobs import JobView
from train_loop.run_dir import ExportStatus

T = TypeVar("T")

_STILL = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RECOVERING, JobState.PAUSED})
"""States in which no worker trains."""


def job_out(view: JobView, *, now: float) -> JobOut:
    """Return a job with its state, progress and cost."""
    job, summary, used = view.job, view.summary, usage_of(view.job, until=now)
    # Constructed without validation, which would call all validators of the spec again.
    return JobOut.model_construct(
        id=job.id,
        name=job.spec.name,
        project=job.spec.project,
        labels=job.spec.labels,
        priority=job.spec.priority,
        state=job.state,
        reason=_reason(view.waits_for or job.reason),
        times={state: _time(entered) for state, entered in job.times.items()},
        created_at=_time(job.created_at),
        updated_at=_time(job.updated_at),
        started_at=_time_or_none(job.started_at),
        finished_at=_time_or_none(job.finished_at),
        spec=job.spec,
        scaling=job.chosen_size,
        sizes=job.sizes,
        run_dir=job.run_dir,
        parent=LineageOut(job=job.parent.job, step=job.parent.step) if job.parent else None,
        attempt=len(job.attempts),
        attempts=tuple(map(_attempt, job.attempts)),
        restarts=summary.restarts,
        progress=_progress(view, now),
        lost_work=LostWork.model_construct(steps=summary.lost_steps, hours=round(summary.lost_seconds / 3600, 4)),
        worker_hours=round(used.worker_hours, 4),
        cpu_hours=round(used.cpu_hours, 4),
        gpu_hours=round(used.gpu_hours, 4),
        goodput=_goodput(view, now),
        dashboard_url=view.dashboard_url,
        warnings=view.warnings,
    )


def _attempt(attempt: Attempt) -> AttemptOut:
    return AttemptOut(
        attempt=attempt.number,
        submission_id=attempt.submission_id,
        workers=attempt.workers,
        result=attempt.result,
        reason=_reason(attempt.reason),
        committed_step=attempt.step,
        started_at=_time(attempt.started_at),
        ended_at=_time_or_none(attempt.ended_at),
    )


def _reason(reason: Reason | None) -> ReasonOut | None:
    return None if reason is None else ReasonOut(code=reason.code, message=reason.message, remedy=reason.remedy)


def _progress(view: JobView, now: float) -> ProgressOut:
    """Combine the progress in the run directory with the position in the queue."""
    parent = view.job.parent
    training = view.job.spec.run.training
    # Epochs may end a run before max_steps.
    last = training.max_steps if training.epochs is None else None
    done = view.summary.progress or Progress(parent.step if parent and view.job.spec.trains else 0, last)
    if view.job.state in _STILL:
        # A rate of the last attempt says nothing of the next one.
        done = replace(done, eta_seconds=None, tokens_per_second=None, mfu=None)
    return ProgressOut.model_construct(
        step=done.step,
        of=done.of,
        unit=view.job.spec.unit,
        percent=round(100 * done.step / done.of, 1) if done.of else None,
        eta_seconds=done.eta_seconds,
        loss=done.loss,
        tokens_per_second=done.tokens_per_second or None,
        mfu=done.mfu,
        place=view.place,
        waits_for=_reason(view.waits_for),
        as_of=_time_or_none(view.read_at),
        age_seconds=None if view.read_at is None else round(max(now - view.read_at, 0.0), 1),
    )


def _goodput(view: JobView, now: float) -> float | None:
    started = view.job.started_at
    wall = (view.job.finished_at or now) - started if started is not None else 0.0
    return round(min(view.summary.productive_seconds / wall, 1.0), 4) if wall > 0 else None


def checkpoint_out(checkpoint: Checkpoint) -> CheckpointOut:
    """Return a committed checkpoint."""
    manifest = checkpoint.manifest
    return CheckpointOut(
        step=manifest.step,
        tokens=manifest.tokens,
        bytes=manifest.bytes,
        time=_time(manifest.time),
        attempt=manifest.attempt,
        world=manifest.world,
        mesh=manifest.mesh,
        metrics=manifest.metrics,
        pinned=checkpoint.pinned,
    )


def digests_out(found: Digests, step: int) -> DigestsOut:
    """Return the digests of a checkpoint's tensors."""
    tensors = {
        name: TensorDigestOut(dtype=one.dtype, shape=list(one.shape), sha256=one.sha256)
        for name, one in found.tensors.items()
    }
    return DigestsOut(step=step, sha256=found.sha256, tensors=tensors)


def export_out(status: ExportStatus, *, run_dir: str) -> ExportOut:
    """Return the state and progress of an export."""
    wish = status.wish
    return ExportOut(
        step=status.step,
        dtype=wish.dtype,
        weights=wish.weights,
        form=wish.form,
        include=wish.include,
        state=status.state,
        progress=status.progress,
        reason=status.reason,
        path=f"{run_dir}/export/{wish.name(status.step)}",
        difference=status.difference,
    )


def run_audit_out(audit: RunAudit) -> RunAuditOut:
    """Return the audit of a run's samples."""
    return RunAuditOut(
        clean=audit.clean,
        steps=audit.steps,
        samples=audit.samples,
        first_step=audit.first_step,
        last_step=audit.last_step,
        lines=audit.lines,
        superseded_lines=audit.superseded,
        repeated=_findings(Findings[Repeat], audit.repeated),
        duplicated=_findings(Findings[Duplicate], audit.duplicated),
        missing_steps=_findings(Findings[Gap], audit.missing_steps),
        missing_samples=_findings(Findings[Unseen], audit.missing_samples),
        out_of_order=_findings(Findings[Difference], audit.out_of_order),
        changed_losses=_findings(Findings[LossChange], audit.changed_losses),
        notes=audit.notes,
    )


def _findings(model: type[Findings[T]], found: Found[T]) -> Findings[T]:
    return model(total=found.total, listed=found.listed)


def key_out(key: Key, caller: Principal) -> KeyOut:
    """Return a key with the roles that this caller may see."""
    roles = dict(key.roles_shown_to(caller))
    return KeyOut(
        id=key.id,
        name=key.name,
        roles=roles,
        shared=roles != key.roles,
        created_at=_time(key.created_at),
        created_by=key.created_by,
        expires_at=_time_or_none(key.expires_at),
        revoked_at=_time_or_none(key.revoked_at),
    )


def audit_entry_out(number: int, entry: AuditEntry) -> DeedOut:
    """Return an entry of the audit log."""
    return DeedOut(
        number=number,
        time=_time(entry.time),
        key_id=entry.caller.id,
        key_name=entry.caller.name,
        request_id=entry.caller.request_id,
        action=entry.action,
        project=entry.project,
        target=entry.target,
        before=dict(entry.before),
        after=dict(entry.after),
    )


def webhook_out(webhook: Webhook) -> WebhookOut:
    """Return a webhook without its signing secret."""
    return WebhookOut(
        id=webhook.id,
        project=webhook.project,
        url=webhook.url,
        states=webhook.states,
        created_at=_time(webhook.created_at),
        created_by=webhook.created_by,
        previous_secret_until=_time_or_none(webhook.previous_until),
        disabled_at=_time_or_none(webhook.disabled_at),
        disabled_because=webhook.disabled_because,
    )


def new_webhook(webhook: Webhook) -> NewWebhook:
    """Return a webhook with its new signing secret."""
    return NewWebhook(webhook=webhook_out(webhook), secret=webhook.secret)


def trial_out(answer: Answer) -> TrialOut:
    """Return the result of a test message."""
    return TrialOut(received=answer.received, status=answer.status, error=answer.error)


def delivery_out(delivery: Delivery) -> DeliveryOut:
    """Return the delivery of a message to a webhook."""
    return DeliveryOut(
        number=delivery.number,
        message_id=delivery.message.id,
        event=delivery.message.event,
        job_id=delivery.message.job_id,
        created_at=_time(delivery.message.time),
        settled=delivery.settled,
        attempts=delivery.attempts,
        status=delivery.status,
        error=delivery.error,
        next_try_at=_time_or_none(delivery.next_at),
        delivered_at=_time_or_none(delivery.delivered_at),
    )


def node_out(view: NodeView) -> NodeOut:
    """Return a node of the cluster."""
    node, last = view.node, view.last_failure
    return NodeOut(
        id=node.id,
        host=node.host,
        address=node.address,
        is_head=node.is_head,
        state=view.state,
        since=_time(view.since),
        total=dict(node.total),
        free=None if node.free is None else dict(node.free),
        jobs=list(view.jobs),
        last_failure=None if last is None else NodeFailure(time=_time(last.time), message=last.message),
    )


def usage_days(found: UsageByDay) -> UsageDays:
    """Return usage, sorted by day, then by project."""
    rows = sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    return UsageDays(data=[UsageOut(project=project, day=day, **asdict(used)) for (project, day), used in rows])


def examination_out(found: DoctorReport) -> ExaminationOut:
    """Return the results of all checks of the doctor."""
    findings = [FindingOut.model_validate(finding, from_attributes=True) for finding in found.findings]
    return ExaminationOut(ok=found.healthy, seconds=found.seconds, findings=findings)


def _time(seconds: float) -> datetime:
    """Convert Unix seconds to a UTC datetime."""
    return datetime.fromtimestamp(seconds, UTC)


def _time_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else _time(seconds)
