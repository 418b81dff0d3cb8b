"""Use cases of webhooks: create, list, delete, test, rotate, list deliveries, redeliver."""

import base64
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from service.domain.access.permissions import administered, require_admin
from service.domain.access.roles import AuditEntry, Principal, Role
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import OVERLAP, Answer, Delivery, Webhook, test_message
from service.domain.webhooks.ssrf import AllowList, parse_target
from service.errors import Busy, DeliveryNotFound, IllegalState, InvalidRequest, WebhookNotFound
from service.ports import Sender, WebhookStore
from train_loop.spec import Problem


@dataclass(frozen=True)
class Webhooks:
    """Use cases of webhooks. Each method with an id raises WebhookNotFound and Forbidden."""

    store: WebhookStore
    sender: Sender
    allowed: AllowList
    clock: Callable[[], float]
    new_id: Callable[[], str]

    def create(self, caller: Principal, project: str, url: str, states: Sequence[JobState]) -> Webhook:
        """Create a webhook; return it with its secret, which later reads omit.

        Raises Forbidden, InvalidRequest, WebhookLimit.
        """
        require_admin(caller, project)
        self._check(url)
        subscribed = tuple(state for state in JobState if not states or state in states)
        webhook = Webhook(f"hook-{self.new_id()}", project, url, subscribed, _secret(), self.clock(), caller.id)
        self.store.add(webhook, self._audit_entry(caller, "create", webhook, after=webhook.facts))
        return webhook

    def visible(self, caller: Principal, project: str | None) -> list[Webhook]:
        """Return the webhooks of a project, or of all projects that the caller administers, newest first.

        Raises Forbidden.
        """
        return self.store.among(administered(caller, project))

    def find(self, caller: Principal, webhook_id: str) -> Webhook:
        """Return a webhook."""
        webhook = self.store.get(webhook_id)
        if webhook is None or not caller.has_role(Role.VIEWER, webhook.project):
            raise WebhookNotFound(webhook_id)
        require_admin(caller, webhook.project)
        return webhook

    def delete(self, caller: Principal, webhook_id: str) -> None:
        """Delete a webhook and its pending deliveries."""
        webhook = self.find(caller, webhook_id)
        self.store.delete(webhook_id, self._audit_entry(caller, "delete", webhook, before=webhook.facts))

    def test(self, caller: Principal, webhook_id: str) -> Answer:
        """Send a test message now, and return the answer; a disabled webhook that receives it is enabled again."""
        webhook, now = self.find(caller, webhook_id), self.clock()
        answer = self.sender.send(webhook, test_message(webhook, number=self.new_id(), now=now), now=now)
        if answer is None:
            raise Busy("the service is shutting down, and nothing was sent; retry in a few seconds")
        if answer.received and webhook.disabled_at is not None:
            self.store.enable(webhook_id, self._audit_entry(caller, "enable", webhook))
        return answer

    def rotate(self, caller: Principal, webhook_id: str) -> Webhook:
        """Rotate the signing secret; the previous one also signs for 24 hours."""
        webhook = self.find(caller, webhook_id)
        until, entry = self.clock() + OVERLAP, self._audit_entry(caller, "rotate", webhook)
        rotated = self.store.rotate(webhook_id, _secret(), until=until, entry=entry)
        if rotated is None:
            raise WebhookNotFound(webhook_id)
        return rotated

    def deliveries(
        self, caller: Principal, webhook_id: str, *, after: int | None, limit: int
    ) -> tuple[list[Delivery], bool]:
        """Return the deliveries of a webhook, newest first, and True if there are more after them."""
        found = self.store.deliveries(self.find(caller, webhook_id).id, after=after, limit=limit + 1)
        return found[:limit], len(found) > limit

    def redeliver(self, caller: Principal, webhook_id: str, number: int) -> Delivery:
        """Send a message again now. Raises DeliveryNotFound, IllegalState."""
        webhook = self.find(caller, webhook_id)
        if webhook.disabled_at is not None:
            raise IllegalState(f"{webhook_id} is disabled; POST /webhooks/{webhook_id}/test enables it once it answers")
        entry = self._audit_entry(caller, "redeliver", webhook, after={"number": number})
        delivery = self.store.redeliver(webhook_id, number, now=self.clock(), entry=entry)
        if delivery is None:
            raise DeliveryNotFound(webhook_id, number)
        return delivery

    def _check(self, url: str) -> None:
        """Raise InvalidRequest unless messages may be sent to the URL; addresses of names are checked at each send."""
        try:
            target = parse_target(url)
        except ValueError as error:
            raise InvalidRequest([Problem("/url", str(error))]) from error
        if target.scheme != "https" and not self.allowed.names(target):
            message = (
                f"{target.scheme} is not allowed for {target.host}; use https://, or ask the operator to add the host"
            )
            raise InvalidRequest([Problem("/url", f"{message} to TRAINSHED_WEBHOOK_ALLOWED")])
        if target.literal is not None and not self.allowed.permits(target, target.host):
            message = (
                f"{target.host} is not on the public internet; choose another receiver, or ask the operator to add it"
            )
            raise InvalidRequest([Problem("/url", f"{message} to TRAINSHED_WEBHOOK_ALLOWED")])

    def _audit_entry(
        self,
        caller: Principal,
        verb: str,
        webhook: Webhook,
        *,
        before: dict[str, JsonValue] | None = None,
        after: dict[str, JsonValue] | None = None,
    ) -> AuditEntry:
        action = f"webhook.{verb}"
        return AuditEntry(self.clock(), caller, action, webhook.project, webhook.id, before or {}, after or {})


def _secret() -> str:
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
