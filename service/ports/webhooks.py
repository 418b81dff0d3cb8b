"""Where webhooks and what they are still to be told are stored, durably, and what tells them."""

from dataclasses import dataclass
from typing import Protocol

from service.domain.access import Deed
from service.domain.webhook import Answer, Delivery, Message, Webhook
from service.ports.jobs import Lease


class WebhookStore(Protocol):
    """Webhooks and the log of their deliveries; a change and its deed are stored at once."""

    def add(self, webhook: Webhook, deed: Deed) -> None:
        """Store a new one. Raises WebhookLimit."""

    def get(self, webhook_id: str) -> Webhook | None:
        """The webhook with this id."""

    def among(self, projects: frozenset[str] | None) -> list[Webhook]:
        """Those of some projects, newest first; None: all."""

    def delete(self, webhook_id: str, deed: Deed) -> bool:
        """Forget one, and what it was still to be told; False: it was gone."""

    def rotate(self, webhook_id: str, secret: str, *, until: float, deed: Deed) -> Webhook | None:
        """Give one another secret beside the one it has, which ends at a time; None: it is gone."""

    def enable(self, webhook_id: str, deed: Deed) -> bool:
        """Let one be told again; False: it was."""

    def deliveries(self, webhook_id: str, *, after: int | None, limit: int) -> list[Delivery]:
        """What it was told or is to be told, newest first, before a delivery of this number."""

    def redeliver(self, webhook_id: str, number: int, *, now: float, deed: Deed) -> Delivery | None:
        """Have a delivery begin anew, at once; None: there is none."""


@dataclass(frozen=True)
class Batch:
    """What one webhook is to be told now; of each job the first message that it does not have yet."""

    webhook: Webhook
    deliveries: tuple[Delivery, ...]


class Outbox(Protocol):
    """Messages that were stored with what they tell of."""

    def claim(self, lease: Lease) -> Batch | None:
        """What is due of the webhook that has waited longest; it is this owner's alone until the lease ends."""

    def release(self, webhook_id: str, *, owner: str, now: float) -> None:
        """Give a webhook back."""

    def release_all(self, owner: str, *, now: float) -> None:
        """Give back whatever this owner's predecessor has left claimed."""

    def record(self, before: Delivery, after: Delivery) -> None:
        """Store what came of an attempt, unless the delivery has changed meanwhile."""

    def disable(self, webhook_id: str, because: str, *, now: float) -> None:
        """Tell a webhook nothing any more; what it was still to be told is given up."""

    def prune(self, *, now: float) -> None:
        """Forget what is over: deliveries that were settled long ago, secrets that sign no longer."""


class Sender(Protocol):
    """What carries a message to its receiver."""

    def send(self, webhook: Webhook, message: Message, *, now: float) -> Answer | None:
        """Send it once, signed; None: the service is about to end, and nobody knows whether it was received."""

    def close(self) -> None:
        """Let go of what is on its way; nothing is sent from now on."""
