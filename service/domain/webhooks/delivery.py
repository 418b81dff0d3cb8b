"""Webhooks: receivers of job events, messages, and retry times. Pure. Times are Unix seconds."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from urllib.parse import urlsplit

from pydantic import JsonValue

from service.domain.jobs.job import Job, JobState

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 3600.0
RETRY_SECONDS = 3 * 86400.0
"""Seconds for which a message is retried."""
FAILING = 5
"""Number of failed attempts after which a webhook counts as failing: some minutes."""
KEPT = 7 * 86400.0
"""Seconds for which a finished delivery stays in the log."""
OVERLAP = 86400.0
"""Seconds after a rotation for which the previous secret signs, too."""
LIMIT = 32
"""Maximum number of webhooks of a project."""


@dataclass(frozen=True)
class Webhook:
    """A receiver of job events of a project, or of ANY."""

    id: str
    project: str
    url: str
    states: tuple[JobState, ...]
    """Job states that trigger a message when a job enters them."""
    secret: str = field(repr=False)
    created_at: float
    created_by: str
    previous_secret: str | None = field(default=None, repr=False)
    previous_until: float | None = None
    disabled_at: float | None = None
    disabled_because: str | None = None

    def secrets(self, now: float) -> tuple[str, ...]:
        """Return the secrets that sign a request, newest first."""
        if self.previous_secret is None or now >= (self.previous_until or 0.0):
            return (self.secret,)
        return (self.secret, self.previous_secret)

    @property
    def facts(self) -> dict[str, JsonValue]:
        """Return the fields for the audit log, without the URL's path: some receivers use it as a secret."""
        parts = urlsplit(self.url)
        return {"project": self.project, "host": f"{parts.scheme}://{parts.netloc}", "states": [*self.states]}


@dataclass(frozen=True)
class Message:
    """A message. Its body never changes, and each attempt to send it has the same id."""

    id: str
    event: str
    job_id: str
    body: str
    time: float


class DeliveryStatus(StrEnum):
    """The status of a delivery."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


@dataclass(frozen=True)
class Delivery:
    """The delivery of a message to one webhook."""

    number: int
    webhook_id: str
    message: Message
    since: float
    """Time at which it was last requested."""
    next_at: float | None
    """Time of the next attempt; None if the delivery is finished."""
    attempts: int = 0
    """Number of attempts since `since`."""
    status: int | None = None
    error: str | None = None
    delivered_at: float | None = None

    @property
    def settled(self) -> DeliveryStatus:
        """Return the status of the delivery."""
        if self.delivered_at is not None:
            return DeliveryStatus.DELIVERED
        return DeliveryStatus.WAITING if self.next_at is not None else DeliveryStatus.GIVEN_UP


@dataclass(frozen=True)
class Answer:
    """The answer of a receiver. `status` is None if there was no answer; then `error` has the reason."""

    status: int | None
    error: str | None = None
    retry_after: float | None = None
    """Seconds that the receiver asks the service to wait."""

    @property
    def received(self) -> bool:
        """Return whether the receiver has accepted the message."""
        return self.error is None

    @property
    def gone(self) -> bool:
        """Return whether the receiver wants no further messages (410 Gone)."""
        return self.status == 410


def answered(status: int, headers: Mapping[str, str], *, now: float) -> Answer:
    """Interpret an HTTP response. Header names must be in lower case."""
    if 200 <= status < 300:
        return Answer(status)
    if 300 <= status < 400:
        # The error does not contain the redirect's target: readers of the log may not be allowed to know it.
        error = f"answered {status}; redirects are not followed, so create the webhook with the URL of the redirect"
    elif status == 410:
        error = "answered 410 Gone, so the webhook was disabled; a successful test call enables it again"
    else:
        error = f"answered {status}; expected a status from 200 to 299"
    retry_after = _seconds(headers.get("retry-after"), now=now) if status in (429, 503) else None
    return Answer(status, error, retry_after)


def apply_answer(delivery: Delivery, answer: Answer, *, now: float, jitter: float) -> Delivery:
    """Return a delivery after one more attempt. `jitter` is a number from 0 to 1."""
    tried = replace(delivery, attempts=delivery.attempts + 1, status=answer.status, error=answer.error)
    if answer.received:
        return replace(tried, delivered_at=now, next_at=None)
    return replace(tried, next_at=None if answer.gone else next_try(tried, answer.retry_after, now=now, jitter=jitter))


def next_try(tried: Delivery, retry_after: float | None, *, now: float, jitter: float) -> float | None:
    """Return the time of the next attempt of a failed delivery; None if it is given up."""
    # The exponent is limited: 20 exceeds the longest pause, and a larger power may overflow a float.
    pause = min(FIRST_PAUSE * 2.0 ** min(tried.attempts - 1, 20), LONGEST_PAUSE) * (0.5 + 0.5 * jitter)
    at = now + max(pause, min(retry_after or 0.0, LONGEST_PAUSE))
    return at if at <= tried.since + RETRY_SECONDS else None


def state_changed_message(job: Job, before: JobState | None, *, version: int) -> Message:
    """Build the message about a job that entered another state. `version` is the version of its stored row."""
    time = job.times.get(job.state, job.updated_at)
    data: dict[str, JsonValue] = {
        "job": {"id": job.id, "name": job.spec.name, "project": job.spec.project},
        "from": before,
        "to": job.state,
        "reason": asdict(job.reason) if job.reason else None,
        "attempt": len(job.attempts),
    }
    return _message(f"{job.id}.{version}", "job.state", data, job_id=job.id, time=time)


def test_message(webhook: Webhook, *, number: str, now: float) -> Message:
    """Build the message that a test call sends."""
    data: dict[str, JsonValue] = {"webhook": webhook.id, "project": webhook.project}
    return _message(f"test-{number}", "webhook.test", data, job_id="", time=now)


def _message(message_id: str, event: str, data: dict[str, JsonValue], *, job_id: str, time: float) -> Message:
    stamp = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
    body = json.dumps({"id": message_id, "type": event, "timestamp": stamp, "data": data})
    return Message(message_id, event, job_id, body, time)


def _seconds(header: str | None, *, now: float) -> float | None:
    """Parse a Retry-After header, in seconds or as a date. Return seconds; None if it is missing or invalid."""
    if header is None:
        return None
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        return max(parsedate_to_datetime(header).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None
