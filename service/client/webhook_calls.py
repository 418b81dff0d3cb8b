"""API calls for webhooks and their deliveries."""

from types import NoneType

from service.api.schemas import DeliveryOut, NewWebhook, Page, TrialOut, WebhookIn, WebhookOut, WebhooksOut
from service.client.call import Sent, operation

_WEBHOOK = "/webhooks/{webhook_id}"


class WebhookCalls:
    """Calls of /webhooks."""

    # Not repeatable: a retry after a lost response would leave a duplicate webhook with an unknown secret.
    @operation(NewWebhook, "POST", "/webhooks", repeatable=False)
    def create_webhook(self, wish: WebhookIn) -> Sent:
        """Create a webhook for the jobs of a project. Only this response contains the secret."""
        return Sent(body=wish)

    @operation(WebhooksOut, "GET", "/webhooks")
    def webhooks(self, *, project: str | None = None) -> Sent:
        """List the webhooks of projects that the caller administers, newest first."""
        return Sent(query={"project": project})

    @operation(WebhookOut, "GET", _WEBHOOK)
    def webhook(self, webhook_id: str) -> Sent:
        """Return a webhook."""
        return Sent({"webhook_id": webhook_id})

    @operation(NoneType, "DELETE", _WEBHOOK)
    def delete_webhook(self, webhook_id: str) -> Sent:
        """Delete a webhook."""
        return Sent({"webhook_id": webhook_id})

    @operation(TrialOut, "POST", f"{_WEBHOOK}/test")
    def test_webhook(self, webhook_id: str) -> Sent:
        """Send a test message at once and return the result."""
        return Sent({"webhook_id": webhook_id})

    # Not repeatable: a second rotation deletes the secret from before the first, which receivers still use.
    @operation(NewWebhook, "POST", f"{_WEBHOOK}/rotate", repeatable=False)
    def rotate_webhook(self, webhook_id: str) -> Sent:
        """Rotate the signing secret. Only this response contains the new one."""
        return Sent({"webhook_id": webhook_id})

    @operation(Page[DeliveryOut], "GET", f"{_WEBHOOK}/deliveries")
    def deliveries(self, webhook_id: str, *, after: int | None = None, limit: int = 50) -> Sent:
        """Return a page of past and pending deliveries, newest first."""
        return Sent({"webhook_id": webhook_id}, {"after": after, "limit": limit})

    @operation(DeliveryOut, "POST", f"{_WEBHOOK}/deliveries/{{number}}/redeliver")
    def redeliver(self, webhook_id: str, number: int) -> Sent:
        """Send a message again."""
        return Sent({"webhook_id": webhook_id, "number": number})
