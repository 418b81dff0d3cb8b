"""The REST API with one typed method per call."""

from collections.abc import AsyncIterator, Mapping
from datetime import date
from types import NoneType

from service.api.schemas import (
    CancelIn,
    CheckpointOut,
    Checkpoints,
    CloneIn,
    DeedOut,
    DeliveryOut,
    DigestsOut,
    ExaminationOut,
    ExportIn,
    ExportOut,
    JobOut,
    JobPage,
    KeyIn,
    Keys,
    Level,
    Line,
    LinePage,
    Me,
    NewKey,
    NewWebhook,
    NodesOut,
    Page,
    PauseIn,
    PlanOut,
    ResumeIn,
    RunAuditOut,
    TextPage,
    TrialOut,
    UsageDays,
    Verified,
    WebhookIn,
    WebhookOut,
    WebhooksOut,
)
from train_loop.spec import ScalingSpec
from trainshed._async.transport import AsyncTransport
from trainshed.call import Call, Query, checkpoint_path, idempotency, job_path, segment, stream, webhook_path
from trainshed.job_base import States, states_of


class AsyncApi(AsyncTransport):
    """All calls of the API. Each raises ApiError, or httpx.HTTPError if the service does not answer.

    Streams (`follow_…`) resume after a disconnect and end when the job finishes.
    """

    # Jobs

    async def submit(self, spec: str | bytes, *, idempotency_key: str | None = None) -> JobOut:
        """Submit a spec in YAML or JSON."""
        return await self._send(Call(JobOut, "POST", "/jobs", body=spec, headers=idempotency(idempotency_key)))

    async def clone(
        self,
        job_id: str,
        *,
        from_checkpoint: int | None = None,
        overrides: Mapping[str, object] | None = None,
        idempotency_key: str | None = None,
    ) -> JobOut:
        """Submit a job that starts from a checkpoint of another job, with changes to its spec."""
        body = CloneIn(from_checkpoint=from_checkpoint, overrides=dict(overrides or {}))
        headers = idempotency(idempotency_key)
        return await self._send(Call(JobOut, "POST", f"{job_path(job_id)}/clone", body=body, headers=headers))

    async def plan(self, spec: str | bytes, *, device: str | None = None, suggest: bool = False) -> PlanOut:
        """Return the plan of a spec, and what it means on a GPU: the named one, or that of the cluster."""
        query: Query = {"device": device, "suggest": "true" if suggest else None}
        return await self._send(Call(PlanOut, "POST", "/jobs/plan", query, body=spec))

    async def jobs(
        self,
        *,
        states: States = (),
        project: str | None = None,
        name: str | None = None,
        id_prefix: str | None = None,
        labels: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """Return a page of jobs, newest first."""
        filters: Query = {
            "state": [state.value for state in states_of(states)],
            "project": project,
            "name": name,
            "id": id_prefix,
        }
        label_filters = {f"label.{key}": value for key, value in (labels or {}).items()}
        query: Query = {**filters, **label_filters, "after": after, "limit": limit}
        return await self._send(Call(JobPage, "GET", "/jobs", query))

    async def job(self, job_id: str) -> JobOut:
        """Return a job."""
        return await self._send(Call(JobOut, "GET", job_path(job_id)))

    async def cancel(self, job_id: str, *, grace_seconds: float | None = None, checkpoint: bool = True) -> JobOut:
        """Request the cancellation of a job."""
        body = CancelIn(grace_seconds=grace_seconds, checkpoint=checkpoint)
        return await self._send(Call(JobOut, "POST", f"{job_path(job_id)}/cancel", body=body))

    async def pause(self, job_id: str, *, grace_seconds: float | None = None) -> JobOut:
        """Request a pause: commit a checkpoint and leave the cluster until the job is resumed."""
        return await self._send(
            Call(JobOut, "POST", f"{job_path(job_id)}/pause", body=PauseIn(grace_seconds=grace_seconds))
        )

    async def resume(self, job_id: str, *, scaling: ScalingSpec | None = None) -> JobOut:
        """Resume a paused job, with another size if one is given."""
        return await self._send(Call(JobOut, "POST", f"{job_path(job_id)}/resume", body=ResumeIn(scaling=scaling)))

    async def delete(self, job_id: str) -> None:
        """Delete a finished job."""
        await self._send(Call(NoneType, "DELETE", job_path(job_id)))

    async def usage(
        self, *, since: date | None = None, until: date | None = None, project: str | None = None
    ) -> UsageDays:
        """Return worker, CPU and GPU hours by project and day, by default of the last 30 days."""
        query: Query = {"since": since, "until": until, "project": project}
        return await self._send(Call(UsageDays, "GET", "/usage", query))

    # Checkpoints

    async def checkpoints(self, job_id: str) -> Checkpoints:
        """Return the committed checkpoints, oldest first."""
        return await self._send(Call(Checkpoints, "GET", f"{job_path(job_id)}/checkpoints"))

    async def verify(self, job_id: str, step: int) -> Verified:
        """Verify all files of a checkpoint. This takes long for large checkpoints."""
        return await self._send(Call(Verified, "POST", f"{checkpoint_path(job_id, step)}/verify", seconds=None))

    async def digests(self, job_id: str, step: int) -> DigestsOut:
        """Verify a checkpoint and return the digests of its tensors. This takes long for large checkpoints."""
        return await self._send(Call(DigestsOut, "GET", f"{checkpoint_path(job_id, step)}/digests", seconds=None))

    async def pin(self, job_id: str, step: int) -> CheckpointOut:
        """Pin a checkpoint: retention never deletes it."""
        return await self._send(Call(CheckpointOut, "POST", f"{checkpoint_path(job_id, step)}/pin"))

    async def unpin(self, job_id: str, step: int) -> CheckpointOut:
        """Unpin a checkpoint: retention may delete it again."""
        return await self._send(Call(CheckpointOut, "DELETE", f"{checkpoint_path(job_id, step)}/pin"))

    async def export(self, job_id: str, step: int, wish: ExportIn | None = None) -> ExportOut:
        """Start the export of a checkpoint as a Hugging Face folder."""
        return await self._send(
            Call(ExportOut, "POST", f"{checkpoint_path(job_id, step)}/export", body=wish or ExportIn())
        )

    async def exported(self, job_id: str, step: int, wish: ExportIn | None = None) -> ExportOut:
        """Return the state and progress of an export."""
        query = (wish or ExportIn()).model_dump()
        return await self._send(Call(ExportOut, "GET", f"{checkpoint_path(job_id, step)}/export", query))

    # Output of a run

    async def events(
        self, job_id: str, *, after: str | None = None, contains: str | None = None, limit: int = 100
    ) -> LinePage:
        """Return a page of events over all attempts."""
        query: Query = {"after": after, "contains": contains, "limit": limit}
        return await self._send(Call(LinePage, "GET", f"{job_path(job_id)}/events", query))

    def follow_events(
        self, job_id: str, *, after: str | None = None, contains: str | None = None
    ) -> AsyncIterator[Line]:
        """Yield events over all attempts as they arrive."""
        return self._follow(stream(Line, f"{job_path(job_id)}/events", {"after": after, "contains": contains}))

    async def metrics(
        self, job_id: str, *, after: str | None = None, points: int | None = None, limit: int = 100
    ) -> LinePage:
        """Return a page of metrics lines over all attempts. With `points`, return all, downsampled to that number."""
        query: Query = {"after": after, "points": points, "limit": limit}
        return await self._send(Call(LinePage, "GET", f"{job_path(job_id)}/metrics", query))

    def follow_metrics(self, job_id: str, *, after: str | None = None) -> AsyncIterator[Line]:
        """Yield metrics lines over all attempts as they arrive."""
        return self._follow(stream(Line, f"{job_path(job_id)}/metrics", {"after": after}))

    async def logs(
        self,
        job_id: str,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        after: str | None = None,
        contains: str | None = None,
        level: Level | None = None,
        raw: bool = False,
        limit: int = 100,
    ) -> TextPage:
        """Return a page of a log, by default of the driver in the newest attempt. With `raw`, with its tracebacks."""
        position: Query = {"attempt": attempt, "rank": rank, "after": after, "raw": raw or None}
        query: Query = {**position, "contains": contains, "level": level, "limit": limit}
        return await self._send(Call(TextPage, "GET", f"{job_path(job_id)}/logs", query))

    def follow_logs(
        self,
        job_id: str,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        after: str | None = None,
        contains: str | None = None,
        level: Level | None = None,
        raw: bool = False,
    ) -> AsyncIterator[str]:
        """Yield the lines of a log as they arrive, by default of the driver in the newest attempt and later ones."""
        position: Query = {"attempt": attempt, "rank": rank, "after": after, "raw": raw or None}
        return self._follow(stream(str, f"{job_path(job_id)}/logs", {**position, "contains": contains, "level": level}))

    async def audit_job(self, job_id: str) -> RunAuditOut:
        """Check the samples that a job's steps trained, over all attempts. Requires `training.audit_samples`."""
        return await self._send(Call(RunAuditOut, "GET", f"{job_path(job_id)}/audit", seconds=None))

    async def results(self, job_id: str, *, after: str | None = None, limit: int = 100) -> LinePage:
        """Return a page of the committed rows of an inference job, after a row's id."""
        query: Query = {"after": after, "limit": limit}
        return await self._send(Call(LinePage, "GET", f"{job_path(job_id)}/results", query))

    # Access

    async def me(self) -> Me:
        """Return the key in use and its roles."""
        return await self._send(Call(Me, "GET", "/me"))

    async def create_key(self, wish: KeyIn) -> NewKey:
        """Create a key. Only this response contains its secret."""
        # Not repeatable: a retry after a lost response would leave a key whose secret is unknown.
        return await self._send(Call(NewKey, "POST", "/keys", body=wish, repeatable=False))

    async def keys(self) -> Keys:
        """List the keys with a role in a project that the caller administers, newest first."""
        return await self._send(Call(Keys, "GET", "/keys"))

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key."""
        await self._send(Call(NoneType, "DELETE", f"/keys/{segment(key_id)}"))

    async def audit(self, *, project: str | None = None, after: int | None = None, limit: int = 50) -> Page[DeedOut]:
        """Return a page of the writes in projects that the caller administers, newest first."""
        query: Query = {"project": project, "after": after, "limit": limit}
        return await self._send(Call(Page[DeedOut], "GET", "/audit", query))

    # Webhooks

    async def create_webhook(self, wish: WebhookIn) -> NewWebhook:
        """Create a webhook for the jobs of a project. Only this response contains the secret."""
        # Not repeatable: a retry after a lost response would leave a duplicate webhook with an unknown secret.
        return await self._send(Call(NewWebhook, "POST", "/webhooks", body=wish, repeatable=False))

    async def webhooks(self, *, project: str | None = None) -> WebhooksOut:
        """List the webhooks of projects that the caller administers, newest first."""
        return await self._send(Call(WebhooksOut, "GET", "/webhooks", {"project": project}))

    async def webhook(self, webhook_id: str) -> WebhookOut:
        """Return a webhook."""
        return await self._send(Call(WebhookOut, "GET", webhook_path(webhook_id)))

    async def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook."""
        await self._send(Call(NoneType, "DELETE", webhook_path(webhook_id)))

    async def test_webhook(self, webhook_id: str) -> TrialOut:
        """Send a test message at once and return the result."""
        return await self._send(Call(TrialOut, "POST", f"{webhook_path(webhook_id)}/test"))

    async def rotate_webhook(self, webhook_id: str) -> NewWebhook:
        """Rotate the signing secret. Only this response contains the new one."""
        # Not repeatable: a second rotation deletes the secret from before the first, which receivers still use.
        return await self._send(Call(NewWebhook, "POST", f"{webhook_path(webhook_id)}/rotate", repeatable=False))

    async def deliveries(self, webhook_id: str, *, after: int | None = None, limit: int = 50) -> Page[DeliveryOut]:
        """Return a page of past and pending deliveries, newest first."""
        query: Query = {"after": after, "limit": limit}
        return await self._send(Call(Page[DeliveryOut], "GET", f"{webhook_path(webhook_id)}/deliveries", query))

    async def redeliver(self, webhook_id: str, number: int) -> DeliveryOut:
        """Send a message again."""
        path = f"{webhook_path(webhook_id)}/deliveries/{segment(number)}/redeliver"
        return await self._send(Call(DeliveryOut, "POST", path))

    # The service

    async def doctor(self) -> ExaminationOut:
        """Check cluster and storage. Takes at most two minutes."""
        return await self._send(Call(ExaminationOut, "POST", "/doctor"))

    async def nodes(self) -> NodesOut:
        """List hosts with state, free capacity, jobs and last failure."""
        return await self._send(Call(NodesOut, "GET", "/nodes"))
