"""The calls about webhooks, and what they were told."""

from types import NoneType

from service.api.schemas import Page
from service.api.webhook_schemas import DeliveryOut, NewWebhook, TrialOut, WebhookIn, WebhookOut, WebhooksOut
from service.client.call import Sent, operation

_WEBHOOK = "/webhooks/{webhook_id}"


class WebhookCalls:
    """/webhooks."""

    # Tried again after its answer was lost it would tell everything twice, once under a secret that nobody has.
    @operation(NewWebhook, "POST", "/webhooks", repeatable=False)
    def create_webhook(self, wish: WebhookIn) -> Sent:
        """Have somebody told of the jobs of a project; the secret is in this answer alone."""
        return Sent(body=wish)

    @operation(WebhooksOut, "GET", "/webhooks")
    def webhooks(self, *, project: str | None = None) -> Sent:
        """The webhooks of projects of which one is an admin, newest first."""
        return Sent(query={"project": project})

    @operation(WebhookOut, "GET", _WEBHOOK)
    def webhook(self, webhook_id: str) -> Sent:
        """One webhook."""
        return Sent({"webhook_id": webhook_id})

    @operation(NoneType, "DELETE", _WEBHOOK)
    def delete_webhook(self, webhook_id: str) -> Sent:
        """Tell it nothing any more."""
        return Sent({"webhook_id": webhook_id})

    @operation(TrialOut, "POST", f"{_WEBHOOK}/test")
    def test_webhook(self, webhook_id: str) -> Sent:
        """Send something at once, and say what came of it."""
        return Sent({"webhook_id": webhook_id})

    # A second rotation forgets the secret before the first, which receivers still verify with.
    @operation(NewWebhook, "POST", f"{_WEBHOOK}/rotate", repeatable=False)
    def rotate_webhook(self, webhook_id: str) -> Sent:
        """Give it another secret, which is in this answer alone."""
        return Sent({"webhook_id": webhook_id})

    @operation(Page[DeliveryOut], "GET", f"{_WEBHOOK}/deliveries")
    def deliveries(self, webhook_id: str, *, after: int | None = None, limit: int = 50) -> Sent:
        """A page of what it was told or is to be told, newest first."""
        return Sent({"webhook_id": webhook_id}, {"after": after, "limit": limit})

    @operation(DeliveryOut, "POST", f"{_WEBHOOK}/deliveries/{{number}}/redeliver")
    def redeliver(self, webhook_id: str, number: int) -> Sent:
        """Send a message again."""
        return Sent({"webhook_id": webhook_id, "number": number})
