"""Fakes that behave like the real adapters: webhooks in a dict, and receivers whose answers a test sets."""

from dataclasses import dataclass, field, replace

from service.domain.access.roles import AuditEntry
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import LIMIT, Answer, Delivery, Message, Webhook
from service.errors import WebhookLimit


def a_webhook(number: int = 1, *, project: str = "default", states: tuple[JobState, ...] = tuple(JobState)) -> Webhook:
    """Return a webhook for these transitions."""
    secret = "whsec_" + "QUJD" * 10
    return Webhook(f"hook-{number}", project, "https://hooks.example/x", states, secret, 1.0, "operator")


@dataclass
class MemoryWebhookStore:
    """A WebhookStore with webhooks in a dict and deliveries in a list. The job store shares its audit log."""

    done: list[AuditEntry] = field(default_factory=list)
    webhooks: dict[str, Webhook] = field(default_factory=dict)
    log: list[Delivery] = field(default_factory=list)

    def add(self, webhook: Webhook, entry: AuditEntry) -> None:
        """Store a new webhook. Raises WebhookLimit if the project has too many."""
        if sum(one.project == webhook.project for one in self.webhooks.values()) >= LIMIT:
            raise WebhookLimit(webhook.project, LIMIT)
        self.webhooks[webhook.id] = webhook
        self.done.append(entry)

    def get(self, webhook_id: str) -> Webhook | None:
        """Return the webhook with this id; None if there is none."""
        return self.webhooks.get(webhook_id)

    def among(self, projects: frozenset[str] | None) -> list[Webhook]:
        """Return the webhooks of these projects, newest first; None means all projects."""
        found = (one for one in self.webhooks.values() if projects is None or one.project in projects)
        return sorted(found, key=lambda one: one.id, reverse=True)

    def delete(self, webhook_id: str, entry: AuditEntry) -> bool:
        """Delete a webhook and its deliveries. Return False if it does not exist."""
        if self.webhooks.pop(webhook_id, None) is None:
            return False
        self.log = [one for one in self.log if one.webhook_id != webhook_id]
        self.done.append(entry)
        return True

    def rotate(self, webhook_id: str, secret: str, *, until: float, entry: AuditEntry) -> Webhook | None:
        """Set a new secret; the previous one stays valid until `until`. Return None if the webhook does not exist."""
        old = self.webhooks.get(webhook_id)
        if old is None:
            return None
        new = replace(old, secret=secret, previous_secret=old.secret, previous_until=until)
        self.webhooks[webhook_id] = new
        self.done.append(entry)
        return new

    def enable(self, webhook_id: str, entry: AuditEntry) -> bool:
        """Enable a webhook again. Return False if it was not disabled."""
        old = self.webhooks.get(webhook_id)
        if old is None or old.disabled_at is None:
            return False
        self.webhooks[webhook_id] = replace(old, disabled_at=None, disabled_because=None)
        self.done.append(entry)
        return True

    def deliveries(self, webhook_id: str, *, after: int | None, limit: int) -> list[Delivery]:
        """Return the deliveries of a webhook, sent or pending, newest first, with numbers below `after`."""
        mine = (one for one in reversed(self.log) if one.webhook_id == webhook_id)
        return [one for one in mine if after is None or one.number < after][:limit]

    def redeliver(self, webhook_id: str, number: int, *, now: float, entry: AuditEntry) -> Delivery | None:
        """Restart a delivery now. Return None if it does not exist."""
        for place, one in enumerate(self.log):
            if (one.webhook_id, one.number) == (webhook_id, number):
                self.log[place] = replace(one, since=now, next_at=now, attempts=0, delivered_at=None)
                self.done.append(entry)
                return self.log[place]
        return None


@dataclass
class MemorySender:
    """A Sender that returns the answers of a test one after another. It repeats the last one."""

    answers: list[Answer | None] = field(default_factory=lambda: [Answer(200)])
    sent: list[tuple[Webhook, Message]] = field(default_factory=list)

    def send(self, webhook: Webhook, message: Message, *, now: float) -> Answer | None:
        """Record the message, and return the next answer."""
        self.sent.append((webhook, message))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def close(self) -> None:
        """Do nothing: no message is in flight."""
