"""Outbox of webhook messages, which are stored together with the change that they report and claimed per webhook."""

import json
from collections.abc import Sequence

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    and_,
    bindparam,
    delete,
    exists,
    insert,
    or_,
    select,
    update,
)

from service.adapters.secret_box import SecretBox
from service.adapters.sql.tables import deliveries, jobs, webhooks
from service.domain.access.roles import ANY
from service.domain.jobs.job import Job, JobState
from service.domain.webhooks.delivery import KEPT, Delivery, Message, Webhook, state_changed_message
from service.ports import Batch, Lease

_BATCH = 50
"""Maximum number of messages in a batch of one webhook."""
_ANY_WEBHOOK = select(webhooks.c.id).limit(1)
"""Query that returns a row if there are any webhooks. Built once: most submits run no other query of webhooks."""
_LISTENING = select(webhooks.c.id, webhooks.c.project, webhooks.c.states).where(
    webhooks.c.project.in_(bindparam("projects", expanding=True)), webhooks.c.disabled_at.is_(None)
)
DeliveryRow = dict[str, str | int | float]
"""A new row of the deliveries table."""


def events_for_new_jobs(connection: Connection, added: Sequence[Job]) -> list[DeliveryRow]:
    """Return the deliveries for new jobs."""
    if connection.execute(_ANY_WEBHOOK).first() is None:
        return []
    found = connection.execute(_LISTENING, {"projects": [ANY, *{job.spec.project for job in added}]}).all()
    return [
        _delivery_row(webhook.id, state_changed_message(job, None, version=job.version))
        for job in added
        for webhook in found
        if webhook.project in (ANY, job.spec.project) and job.state in json.loads(webhook.states)
    ]


def events_for_change(connection: Connection, job: Job) -> list[DeliveryRow]:
    """Return the deliveries for a change of state. Call it before the job is stored over the version that was read."""
    if connection.execute(_ANY_WEBHOOK).first() is None:
        return []
    listening = (
        select(webhooks.c.id, webhooks.c.states, jobs.c.state)
        .join_from(jobs, webhooks, webhooks.c.project.in_((ANY, job.spec.project)))
        .where(jobs.c.id == job.id, jobs.c.version == job.version, jobs.c.state != job.state.value)
        .where(webhooks.c.disabled_at.is_(None))
    )
    return [
        _delivery_row(webhook.id, state_changed_message(job, JobState(webhook.state), version=job.version + 1))
        for webhook in connection.execute(listening).all()
        if job.state in json.loads(webhook.states)
    ]


def enqueue_events(connection: Connection, events: Sequence[DeliveryRow]) -> None:
    """Write deliveries in the transaction of the change that they report, after the change.

    So the numbers of a job's deliveries are in the order of its changes.
    """
    if events:
        connection.execute(insert(deliveries), events)


class SqlOutbox:
    """An Outbox with messages as rows. A claim leases the webhook."""

    def __init__(self, engine: Engine, box: SecretBox | None = None) -> None:
        """Create the outbox. `box` decrypts the webhooks' secrets; without a box they are plain."""
        self._engine = engine
        self._box = box or SecretBox()

    def claim(self, lease: Lease) -> Batch | None:
        """Claim the webhook that has waited longest, until the lease ends, and return its due deliveries."""
        free = webhooks.c.lease_until <= lease.now
        waiting = exists().where(deliveries.c.webhook_id == webhooks.c.id, _due(lease.now))
        longest = (
            select(webhooks).where(webhooks.c.disabled_at.is_(None), free, waiting).order_by(webhooks.c.lease_until)
        )
        first = select(deliveries).where(_due(lease.now)).order_by(deliveries.c.number).limit(_BATCH)
        with self._engine.connect() as connection:
            webhook = connection.execute(longest.limit(1)).first()
        if webhook is None:
            return None
        mine = update(webhooks).where(webhooks.c.id == webhook.id, free)
        with self._engine.begin() as connection:
            if connection.execute(mine.values(lease_owner=lease.owner, lease_until=lease.until)).rowcount != 1:
                return None
            # Read the deliveries after the claim: another owner may have sent some before.
            rows = connection.execute(first.where(deliveries.c.webhook_id == webhook.id)).all()
        return Batch(to_webhook(webhook, self._box), tuple(map(to_delivery, rows)))

    def release(self, webhook_id: str, *, owner: str, now: float) -> None:
        """Release the claim of a webhook."""
        self._release(webhooks.c.id == webhook_id, owner, now)

    def release_all(self, owner: str, *, now: float) -> None:
        """Release all claims that an earlier process left under this owner's name."""
        self._release(webhooks.c.lease_until > now, owner, now)

    def _release(self, which: ColumnElement[bool], owner: str, now: float) -> None:
        # Keep the time of the release: `claim` prefers webhooks with earlier times.
        free = update(webhooks).where(which, webhooks.c.lease_owner == owner).values(lease_owner=None, lease_until=now)
        with self._engine.begin() as connection:
            connection.execute(free)

    def record(self, before: Delivery, after: Delivery) -> None:
        """Store the result of an attempt, unless the delivery has changed meanwhile."""
        same = and_(
            deliveries.c.number == before.number,
            deliveries.c.attempts == before.attempts,
            deliveries.c.since == before.since,
            deliveries.c.next_at.is_not(None),
        )
        names = ("next_at", "attempts", "status", "error", "delivered_at")
        with self._engine.begin() as connection:
            connection.execute(update(deliveries).where(same).values({name: getattr(after, name) for name in names}))

    def disable(self, webhook_id: str, because: str, *, now: float) -> None:
        """Disable a webhook, and give up its pending deliveries."""
        off = update(webhooks).where(webhooks.c.id == webhook_id).values(disabled_at=now, disabled_because=because)
        waiting = (deliveries.c.webhook_id == webhook_id) & deliveries.c.next_at.is_not(None)
        with self._engine.begin() as connection:
            connection.execute(off)
            connection.execute(update(deliveries).where(waiting).values(next_at=None, error=because))

    def prune(self, *, now: float) -> None:
        """Delete expired data: deliveries that finished long ago, and secrets that no longer sign."""
        # Pending deliveries do not expire, unless their webhook was deleted or disabled.
        nobody = deliveries.c.webhook_id.not_in(select(webhooks.c.id).where(webhooks.c.disabled_at.is_(None)))
        over = (deliveries.c.since < now - KEPT) & or_(deliveries.c.next_at.is_(None), nobody)
        old = update(webhooks).where(webhooks.c.previous_until <= now)
        with self._engine.begin() as connection:
            # Lock webhooks before deliveries, as the deletion of a webhook does: another order may deadlock.
            connection.execute(old.values(previous_secret=None, previous_until=None))
            connection.execute(delete(deliveries).where(over))


def to_webhook(row: Row[tuple[object, ...]], box: SecretBox) -> Webhook:
    """Return the webhook of a row that has every column of the table. Raises SecretsUnreadable."""
    fields = dict(row._mapping)
    for name in ("place", "lease_owner", "lease_until"):
        del fields[name]
    for name in ("secret", "previous_secret"):
        fields[name] = None if fields[name] is None else box.open(fields[name])
    return Webhook(**fields | {"states": tuple(map(JobState, json.loads(row.states)))})


def to_delivery(row: Row[tuple[object, ...]]) -> Delivery:
    """Return the delivery of a row that has every column of the table."""
    return Delivery(
        number=row.number,
        webhook_id=row.webhook_id,
        message=Message(row.message_id, row.event, row.job_id, row.body, row.time),
        since=row.since,
        next_at=row.next_at,
        attempts=row.attempts,
        status=row.status,
        error=row.error,
        delivered_at=row.delivered_at,
    )


def _delivery_row(webhook_id: str, message: Message) -> DeliveryRow:
    return {
        "webhook_id": webhook_id,
        "message_id": message.id,
        "event": message.event,
        "job_id": message.job_id,
        "body": message.body,
        "time": message.time,
        "since": message.time,
        "next_at": message.time,
        "attempts": 0,
    }


def _due(now: float) -> ColumnElement[bool]:
    """Return the condition of due deliveries.

    Their time has come, and all earlier deliveries of the same job to the same webhook are finished.
    """
    earlier = deliveries.alias()
    held_up = exists().where(
        earlier.c.job_id == deliveries.c.job_id,
        earlier.c.webhook_id == deliveries.c.webhook_id,
        earlier.c.next_at.is_not(None),
        earlier.c.number < deliveries.c.number,
    )
    return and_(deliveries.c.next_at <= now, ~held_up)
