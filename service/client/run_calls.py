"""API calls for the output of a run, in pages or as a stream."""

from pydantic import JsonValue

from service.api.schemas import LinePage, RunAuditOut, TextPage
from service.client.call import Sent, operation, stream
from service.filters import Level

Line = dict[str, JsonValue]
"""An event, or the metrics of a logged step."""


class RunCalls:
    """Calls for events, metrics and logs of a job.

    Streams resume after a disconnect and end when the job finishes.
    """

    @operation(LinePage, "GET", "/jobs/{job_id}/events")
    def events(self, job_id: str, *, after: str | None = None, contains: str | None = None, limit: int = 100) -> Sent:
        """Return a page of events over all attempts."""
        return Sent({"job_id": job_id}, {"after": after, "contains": contains, "limit": limit})

    @stream(Line, "/jobs/{job_id}/events")
    def follow_events(self, job_id: str, *, after: str | None = None, contains: str | None = None) -> Sent:
        """Yield events over all attempts as they arrive."""
        return Sent({"job_id": job_id}, {"after": after, "contains": contains})

    @operation(LinePage, "GET", "/jobs/{job_id}/metrics")
    def metrics(self, job_id: str, *, after: str | None = None, points: int | None = None, limit: int = 100) -> Sent:
        """Return a page of metrics lines over all attempts. With `points`, return all, downsampled to that number."""
        return Sent({"job_id": job_id}, {"after": after, "points": points, "limit": limit})

    @stream(Line, "/jobs/{job_id}/metrics")
    def follow_metrics(self, job_id: str, *, after: str | None = None) -> Sent:
        """Yield metrics lines over all attempts as they arrive."""
        return Sent({"job_id": job_id}, {"after": after})

    @operation(RunAuditOut, "GET", "/jobs/{job_id}/audit", seconds=None)
    def audit_job(self, job_id: str) -> Sent:
        """Check the samples that a job's steps trained, over all attempts. Requires `training.audit_samples`."""
        return Sent({"job_id": job_id})

    @operation(TextPage, "GET", "/jobs/{job_id}/logs")
    def logs(
        self,
        job_id: str,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        after: str | None = None,
        contains: str | None = None,
        level: Level | None = None,
        limit: int = 100,
    ) -> Sent:
        """Return a page of a log, by default of the driver in the newest attempt."""
        place = {"attempt": attempt, "rank": rank, "after": after}
        return Sent({"job_id": job_id}, {**place, "contains": contains, "level": level, "limit": limit})

    @stream(str, "/jobs/{job_id}/logs")
    def follow_logs(
        self,
        job_id: str,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        after: str | None = None,
        contains: str | None = None,
        level: Level | None = None,
    ) -> Sent:
        """Yield the lines of a log as they arrive, by default of the newest attempt and later ones."""
        place = {"attempt": attempt, "rank": rank, "after": after}
        return Sent({"job_id": job_id}, {**place, "contains": contains, "level": level})
