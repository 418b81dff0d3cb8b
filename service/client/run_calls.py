"""The calls about what a run writes: pages of it, and lines as they come."""

from pydantic import JsonValue

from service.api.audit_schemas import RunAuditOut
from service.api.schemas import LinePage, TextPage
from service.client.call import Sent, operation, stream
from service.filters import Level

Line = dict[str, JsonValue]
"""An event, or the metrics of a logged step."""


class RunCalls:
    """Events, metrics and logs of a job.

    Those that follow take up again where they were cut off, and end when the job has.
    """

    @operation(LinePage, "GET", "/jobs/{job_id}/events")
    def events(self, job_id: str, *, after: str | None = None, contains: str | None = None, limit: int = 100) -> Sent:
        """A page of events over all attempts."""
        return Sent({"job_id": job_id}, {"after": after, "contains": contains, "limit": limit})

    @stream(Line, "/jobs/{job_id}/events")
    def follow_events(self, job_id: str, *, after: str | None = None, contains: str | None = None) -> Sent:
        """Events over all attempts, as they come."""
        return Sent({"job_id": job_id}, {"after": after, "contains": contains})

    @operation(LinePage, "GET", "/jobs/{job_id}/metrics")
    def metrics(self, job_id: str, *, after: str | None = None, points: int | None = None, limit: int = 100) -> Sent:
        """A page of metrics lines over all attempts; with `points` all of them, in so many lines at most."""
        return Sent({"job_id": job_id}, {"after": after, "points": points, "limit": limit})

    @stream(Line, "/jobs/{job_id}/metrics")
    def follow_metrics(self, job_id: str, *, after: str | None = None) -> Sent:
        """Metrics lines over all attempts, as they come."""
        return Sent({"job_id": job_id}, {"after": after})

    @operation(RunAuditOut, "GET", "/jobs/{job_id}/audit", seconds=None)
    def audit_job(self, job_id: str) -> Sent:
        """Check which samples the steps of a job trained, over all attempts; needs `training.audit_samples`."""
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
        """A page of one log's lines; of the driver's and the newest attempt's, unless told otherwise."""
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
        """The lines of one log, as they come; of the newest attempt and those after it, unless told otherwise."""
        place = {"attempt": attempt, "rank": rank, "after": after}
        return Sent({"job_id": job_id}, {**place, "contains": contains, "level": level})
