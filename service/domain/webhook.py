"""Webhooks: who is told of a job's changes, in what words, and when it is tried again. Pure. Times are Unix seconds."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from urllib.parse import urlsplit

from pydantic import JsonValue

from service.domain.job import Job, JobState

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 3600.0
PATIENCE = 3 * 86400.0
"""For so long a message is tried again."""
KEPT = 7 * 86400.0
"""For so long one that was settled stays in the log."""
OVERLAP = 86400.0
"""For so long after a rotation the secret before it signs as well."""
LIMIT = 32
"""Webhooks of a project."""


@dataclass(frozen=True)
class Webhook:
    """Who is told of the jobs of a project, or of ANY."""

    id: str
    project: str
    url: str
    states: tuple[JobState, ...]
    """Those whose beginning it is told of."""
    secret: str = field(repr=False)
    created_at: float
    created_by: str
    previous_secret: str | None = field(default=None, repr=False)
    previous_until: float | None = None
    disabled_at: float | None = None
    disabled_because: str | None = None

    def secrets(self, now: float) -> tuple[str, ...]:
        """What a request is signed with, the newest first."""
        if self.previous_secret is None or now >= (self.previous_until or 0.0):
            return (self.secret,)
        return (self.secret, self.previous_secret)

    @property
    def facts(self) -> dict[str, JsonValue]:
        """What the audit log tells of it: no path, which for some receivers is a secret."""
        parts = urlsplit(self.url)
        return {"project": self.project, "host": f"{parts.scheme}://{parts.netloc}", "states": [*self.states]}


@dataclass(frozen=True)
class Message:
    """What is told, in words that never change; its id is the same however often it is sent."""

    id: str
    event: str
    job_id: str
    body: str
    time: float


class Settled(StrEnum):
    """How far a delivery is."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


@dataclass(frozen=True)
class Delivery:
    """A message on its way to one webhook."""

    number: int
    webhook_id: str
    message: Message
    since: float
    """When it was asked for, the last time."""
    next_at: float | None
    """None: it is settled."""
    attempts: int = 0
    """Since then."""
    status: int | None = None
    error: str | None = None
    delivered_at: float | None = None

    @property
    def settled(self) -> Settled:
        """How far it is."""
        if self.delivered_at is not None:
            return Settled.DELIVERED
        return Settled.WAITING if self.next_at is not None else Settled.GIVEN_UP


@dataclass(frozen=True)
class Answer:
    """What a receiver answered; without a status it did not, and `error` says why."""

    status: int | None
    error: str | None = None
    retry_after: float | None = None
    """Seconds that it asks to be left alone for."""

    @property
    def received(self) -> bool:
        """Whether it has the message."""
        return self.error is None

    @property
    def gone(self) -> bool:
        """Whether it wants none any more."""
        return self.status == 410


def answered(status: int, headers: Mapping[str, str], *, now: float) -> Answer:
    """What an answer means; header names are in lower case."""
    if 200 <= status < 300:
        return Answer(status)
    if 300 <= status < 400:
        # Not told where to: whoever may read the log may not know of that place.
        error = f"answered {status}, a redirect, and none is followed; give the webhook the address that it leads to"
    elif status == 410:
        error = "answered 410 Gone, so that the webhook is disabled; a test call that is received enables it again"
    else:
        error = f"answered {status}; any status from 200 to 299 says that a message was received"
    asked = _seconds(headers.get("retry-after"), now=now) if status in (429, 503) else None
    return Answer(status, error, asked)


def settle(delivery: Delivery, answer: Answer, *, now: float, jitter: float) -> Delivery:
    """A delivery after one more attempt; `jitter` is anything from 0 to 1."""
    tried = replace(delivery, attempts=delivery.attempts + 1, status=answer.status, error=answer.error)
    if answer.received:
        return replace(tried, delivered_at=now, next_at=None)
    return replace(tried, next_at=None if answer.gone else next_try(tried, answer.retry_after, now=now, jitter=jitter))


def next_try(tried: Delivery, asked: float | None, *, now: float, jitter: float) -> float | None:
    """When a delivery that has failed is tried again; None: it is given up."""
    # The number of attempts that reach the longest pause, so that no power is too large for a float.
    pause = min(FIRST_PAUSE * 2.0 ** min(tried.attempts - 1, 20), LONGEST_PAUSE) * (0.5 + 0.5 * jitter)
    at = now + max(pause, min(asked or 0.0, LONGEST_PAUSE))
    return at if at <= tried.since + PATIENCE else None


def told_of(job: Job, before: JobState | None, *, version: int) -> Message:
    """What is told of a job that has come to another state; `version` is that of the row that is stored with it."""
    time = job.times.get(job.state, job.updated_at)
    data: dict[str, JsonValue] = {
        "job": {"id": job.id, "name": job.spec.name, "project": job.spec.project},
        "from": before,
        "to": job.state,
        "reason": asdict(job.reason) if job.reason else None,
        "attempt": len(job.attempts),
    }
    return _message(f"{job.id}.{version}", "job.state", data, job_id=job.id, time=time)


def trial_message(webhook: Webhook, *, number: str, now: float) -> Message:
    """What a test call sends."""
    data: dict[str, JsonValue] = {"webhook": webhook.id, "project": webhook.project}
    return _message(f"test-{number}", "webhook.test", data, job_id="", time=now)


def _message(message_id: str, event: str, data: dict[str, JsonValue], *, job_id: str, time: float) -> Message:
    stamp = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
    body = json.dumps({"id": message_id, "type": event, "timestamp": stamp, "data": data})
    return Message(message_id, event, job_id, body, time)


def _seconds(header: str | None, *, now: float) -> float | None:
    """What a Retry-After asks for: seconds, or a date."""
    if header is None:
        return None
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        return max(parsedate_to_datetime(header).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None
