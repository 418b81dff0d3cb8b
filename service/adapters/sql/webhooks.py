"""A WebhookStore on SQLite or Postgres."""

import json
from dataclasses import asdict

from sqlalchemy import Engine, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.adapters.secret_box import SecretBox
from service.adapters.sql.access import write_audit_entries
from service.adapters.sql.outbox import to_delivery, to_webhook
from service.adapters.sql.tables import deliveries, webhooks
from service.domain.access.roles import AuditEntry
from service.domain.webhooks.delivery import LIMIT, Delivery, Webhook
from service.errors import WebhookLimit


class SqlWebhookStore:
    """A WebhookStore with webhooks and deliveries as rows. Every method is one transaction."""

    def __init__(self, engine: Engine, box: SecretBox | None = None) -> None:
        """Create the store. `box` encrypts the secrets; without a box they stay plain."""
        self._engine = engine
        self._box = box or SecretBox()

    def add(self, webhook: Webhook, entry: AuditEntry) -> None:
        """Store a new webhook. Raises WebhookLimit if the project has too many."""
        # An attempt fails if another request takes the same place at the same time.
        if not any(self._added(webhook, entry) for _ in range(LIMIT + 1)):
            raise WebhookLimit(webhook.project, LIMIT)

    def _added(self, webhook: Webhook, entry: AuditEntry) -> bool:
        places = select(webhooks.c.place).where(webhooks.c.project == webhook.project)
        sealed = {"secret": self._box.seal(webhook.secret), "states": json.dumps(webhook.states)}
        row = asdict(webhook) | sealed | {"lease_until": 0.0}
        try:
            with self._engine.begin() as connection:
                free = set(range(LIMIT)) - set(connection.execute(places).scalars())
                if not free:
                    raise WebhookLimit(webhook.project, LIMIT)
                connection.execute(insert(webhooks).values(row | {"place": min(free)}))
                write_audit_entries(connection, [entry])
        except IntegrityError:
            return False
        return True

    def get(self, webhook_id: str) -> Webhook | None:
        """Return the webhook with this id; None if there is none."""
        with self._engine.connect() as connection:
            row = connection.execute(select(webhooks).where(webhooks.c.id == webhook_id)).first()
        return to_webhook(row, self._box) if row is not None else None

    def among(self, projects: frozenset[str] | None) -> list[Webhook]:
        """Return the webhooks of these projects, newest first; None means all projects."""
        query = select(webhooks).order_by(webhooks.c.id.desc())
        if projects is not None:
            query = query.where(webhooks.c.project.in_(projects))
        with self._engine.connect() as connection:
            return [to_webhook(row, self._box) for row in connection.execute(query)]

    def delete(self, webhook_id: str, entry: AuditEntry) -> bool:
        """Delete a webhook and its deliveries. Return False if it does not exist."""
        with self._engine.begin() as connection:
            if connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id)).rowcount != 1:
                return False
            connection.execute(delete(deliveries).where(deliveries.c.webhook_id == webhook_id))
            write_audit_entries(connection, [entry])
        return True

    def rotate(self, webhook_id: str, secret: str, *, until: float, entry: AuditEntry) -> Webhook | None:
        """Set a new secret; the previous one stays valid until `until`. Return None if the webhook does not exist."""
        new = {"secret": self._box.seal(secret), "previous_secret": webhooks.c.secret, "previous_until": until}
        this = webhooks.c.id == webhook_id
        with self._engine.begin() as connection:
            if connection.execute(update(webhooks).where(this).values(new)).rowcount != 1:
                return None
            write_audit_entries(connection, [entry])
            return to_webhook(connection.execute(select(webhooks).where(this)).one(), self._box)

    def enable(self, webhook_id: str, entry: AuditEntry) -> bool:
        """Enable a webhook again. Return False if it was not disabled."""
        off = (webhooks.c.id == webhook_id) & webhooks.c.disabled_at.is_not(None)
        with self._engine.begin() as connection:
            on = update(webhooks).where(off).values(disabled_at=None, disabled_because=None)
            if connection.execute(on).rowcount != 1:
                return False
            write_audit_entries(connection, [entry])
        return True

    def deliveries(self, webhook_id: str, *, after: int | None, limit: int) -> list[Delivery]:
        """Return the deliveries of a webhook, sent or pending, newest first, with numbers below `after`."""
        query = select(deliveries).where(deliveries.c.webhook_id == webhook_id)
        if after is not None:
            query = query.where(deliveries.c.number < after)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(deliveries.c.number.desc()).limit(limit)).all()
        return [to_delivery(row) for row in rows]

    def redeliver(self, webhook_id: str, number: int, *, now: float, entry: AuditEntry) -> Delivery | None:
        """Restart a delivery now. Return None if it does not exist."""
        this = (deliveries.c.webhook_id == webhook_id) & (deliveries.c.number == number)
        anew = {"since": now, "next_at": now, "attempts": 0, "delivered_at": None}
        with self._engine.begin() as connection:
            if connection.execute(update(deliveries).where(this).values(anew)).rowcount != 1:
                return None
            write_audit_entries(connection, [entry])
            return to_delivery(connection.execute(select(deliveries).where(this)).one())
