"""Ports to the durable store of webhooks and their deliveries, to the outbox, and to the sender."""

from dataclasses import dataclass
from typing import Protocol

from service.domain.access.roles import AuditEntry
from service.domain.webhooks.delivery import Answer, Delivery, Message, Webhook
from service.ports.jobs import Lease


class WebhookStore(Protocol):
    """Store of webhooks and their delivery log. A change and its audit entry are stored in one transaction."""

    def add(self, webhook: Webhook, entry: AuditEntry) -> None:
        """Store a new webhook. Raises WebhookLimit if the project has too many."""

    def get(self, webhook_id: str) -> Webhook | None:
        """Return the webhook with this id; None if there is none."""

    def among(self, projects: frozenset[str] | None) -> list[Webhook]:
        """Return the webhooks of these projects, newest first; None means all projects."""

    def delete(self, webhook_id: str, entry: AuditEntry) -> bool:
        """Delete a webhook and its deliveries. Return False if it does not exist."""

    def rotate(self, webhook_id: str, secret: str, *, until: float, entry: AuditEntry) -> Webhook | None:
        """Set a new secret; the previous one stays valid until `until`. Return None if the webhook does not exist."""

    def enable(self, webhook_id: str, entry: AuditEntry) -> bool:
        """Enable a webhook again. Return False if it was not disabled."""

    def deliveries(self, webhook_id: str, *, after: int | None, limit: int) -> list[Delivery]:
        """Return the deliveries of a webhook, sent or pending, newest first, with numbers below `after`."""

    def redeliver(self, webhook_id: str, number: int, *, now: float, entry: AuditEntry) -> Delivery | None:
        """Restart a delivery now. Return None if it does not exist."""


@dataclass(frozen=True)
class Batch:
    """The due deliveries of one webhook: for each job, its first message that is still pending."""

    webhook: Webhook
    deliveries: tuple[Delivery, ...]


class Outbox(Protocol):
    """Messages that are stored in the transaction of the change that they report."""

    def claim(self, lease: Lease) -> Batch | None:
        """Claim the webhook that has waited longest, until the lease ends, and return its due deliveries."""

    def release(self, webhook_id: str, *, owner: str, now: float) -> None:
        """Release the claim of a webhook."""

    def release_all(self, owner: str, *, now: float) -> None:
        """Release all claims that an earlier process left under this owner's name."""

    def record(self, before: Delivery, after: Delivery) -> None:
        """Store the result of an attempt, unless the delivery has changed meanwhile."""

    def disable(self, webhook_id: str, because: str, *, now: float) -> None:
        """Disable a webhook, and give up its pending deliveries."""

    def prune(self, *, now: float) -> None:
        """Delete expired data: deliveries that finished long ago, and secrets that no longer sign."""


class Sender(Protocol):
    """A sender of messages to their receivers."""

    def send(self, webhook: Webhook, message: Message, *, now: float) -> Answer | None:
        """Send a signed message once. Return None if the service stops first: then the result is unknown."""

    def close(self) -> None:
        """Cancel in-flight messages. From then on, send nothing."""
