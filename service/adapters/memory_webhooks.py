"""Fakes with the behaviour of the real adapters: webhooks in a dict, and receivers that answer as they are told."""

from dataclasses import dataclass, field, replace

from service.domain.access import Deed
from service.domain.webhook import LIMIT, Answer, Delivery, Message, Webhook
from service.errors import WebhookLimit


@dataclass
class MemoryWebhookStore:
    """Webhooks in a dict, what they were told in a list, and the deeds that the jobs' store shares."""

    done: list[Deed] = field(default_factory=list)
    webhooks: dict[str, Webhook] = field(default_factory=dict)
    log: list[Delivery] = field(default_factory=list)

    def add(self, webhook: Webhook, deed: Deed) -> None:
        """Store a new one. Raises WebhookLimit."""
        if sum(one.project == webhook.project for one in self.webhooks.values()) >= LIMIT:
            raise WebhookLimit(webhook.project, LIMIT)
        self.webhooks[webhook.id] = webhook
        self.done.append(deed)

    def get(self, webhook_id: str) -> Webhook | None:
        """The webhook with this id."""
        return self.webhooks.get(webhook_id)

    def among(self, projects: frozenset[str] | None) -> list[Webhook]:
        """Those of some projects, newest first; None: all."""
        found = (one for one in self.webhooks.values() if projects is None or one.project in projects)
        return sorted(found, key=lambda one: one.id, reverse=True)

    def delete(self, webhook_id: str, deed: Deed) -> bool:
        """Forget one, and what it was still to be told; False: it was gone."""
        if self.webhooks.pop(webhook_id, None) is None:
            return False
        self.log = [one for one in self.log if one.webhook_id != webhook_id]
        self.done.append(deed)
        return True

    def rotate(self, webhook_id: str, secret: str, *, until: float, deed: Deed) -> Webhook | None:
        """Give one another secret beside the one it has, which ends at a time; None: it is gone."""
        old = self.webhooks.get(webhook_id)
        if old is None:
            return None
        new = replace(old, secret=secret, previous_secret=old.secret, previous_until=until)
        self.webhooks[webhook_id] = new
        self.done.append(deed)
        return new

    def enable(self, webhook_id: str, deed: Deed) -> bool:
        """Let one be told again; False: it was."""
        old = self.webhooks.get(webhook_id)
        if old is None or old.disabled_at is None:
            return False
        self.webhooks[webhook_id] = replace(old, disabled_at=None, disabled_because=None)
        self.done.append(deed)
        return True

    def deliveries(self, webhook_id: str, *, after: int | None, limit: int) -> list[Delivery]:
        """What it was told or is to be told, newest first, before a delivery of this number."""
        mine = (one for one in reversed(self.log) if one.webhook_id == webhook_id)
        return [one for one in mine if after is None or one.number < after][:limit]

    def redeliver(self, webhook_id: str, number: int, *, now: float, deed: Deed) -> Delivery | None:
        """Have a delivery begin anew, at once; None: there is none."""
        for place, one in enumerate(self.log):
            if (one.webhook_id, one.number) == (webhook_id, number):
                self.log[place] = replace(one, since=now, next_at=now, attempts=0, delivered_at=None)
                self.done.append(deed)
                return self.log[place]
        return None


@dataclass
class MemorySender:
    """Receivers that answer what a test says; one after another, the last one for ever."""

    answers: list[Answer | None] = field(default_factory=lambda: [Answer(200)])
    sent: list[tuple[Webhook, Message]] = field(default_factory=list)

    def send(self, webhook: Webhook, message: Message, *, now: float) -> Answer | None:
        """Write down what was sent."""
        self.sent.append((webhook, message))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def close(self) -> None:
        """Nothing is on its way."""
