"""Request and response models of webhooks and their deliveries."""

from pydantic import BaseModel, ConfigDict, Field

from service.api.access_schemas import Project
from service.api.schemas import Time, as_time, time_or_none
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import Answer, Delivery, Settled, Webhook


class WebhookIn(BaseModel):
    """A request to create a webhook."""

    model_config = ConfigDict(extra="forbid")

    project: Project = Field(description="project whose job events are sent; `*` for all")
    url: str = Field(min_length=1, max_length=2048, description="an https:// URL on the open internet")
    states: list[JobState] = Field(
        default=[], max_length=len(JobState), description="states that trigger an event; empty: all"
    )


class WebhookOut(BaseModel):
    """A webhook, without its signing secret."""

    id: str
    project: str
    url: str
    states: tuple[JobState, ...]
    created_at: Time
    created_by: str
    previous_secret_until: Time | None = Field(description="expiry of the secret before the last rotation")
    disabled_at: Time | None
    disabled_because: str | None

    @classmethod
    def of(cls, webhook: Webhook) -> "WebhookOut":
        """Build from the domain."""
        return cls(
            id=webhook.id,
            project=webhook.project,
            url=webhook.url,
            states=webhook.states,
            created_at=as_time(webhook.created_at),
            created_by=webhook.created_by,
            previous_secret_until=time_or_none(webhook.previous_until),
            disabled_at=time_or_none(webhook.disabled_at),
            disabled_because=webhook.disabled_because,
        )


class NewWebhook(BaseModel):
    """A webhook and its new secret."""

    webhook: WebhookOut
    secret: str = Field(description="key to verify signatures; it is not shown again")

    @classmethod
    def of(cls, webhook: Webhook) -> "NewWebhook":
        """Build from the domain."""
        return cls(webhook=WebhookOut.of(webhook), secret=webhook.secret)


class WebhooksOut(BaseModel):
    """Webhooks, newest first."""

    data: list[WebhookOut]


class TrialOut(BaseModel):
    """The result of a test message."""

    received: bool
    status: int | None = Field(description="HTTP status of the response; null if there was none")
    error: str | None

    @classmethod
    def of(cls, answer: Answer) -> "TrialOut":
        """Build from the domain."""
        return cls(received=answer.received, status=answer.status, error=answer.error)


class DeliveryOut(BaseModel):
    """The delivery of a message to a webhook."""

    number: int
    message_id: str = Field(description="the header webhook-id, the same in each attempt")
    event: str
    job_id: str
    created_at: Time
    settled: Settled
    attempts: int
    status: int | None = Field(description="HTTP status of the last response; null if there was none")
    error: str | None = Field(description="why the last attempt failed")
    next_try_at: Time | None
    delivered_at: Time | None

    @classmethod
    def of(cls, delivery: Delivery) -> "DeliveryOut":
        """Build from the domain."""
        return cls(
            number=delivery.number,
            message_id=delivery.message.id,
            event=delivery.message.event,
            job_id=delivery.message.job_id,
            created_at=as_time(delivery.message.time),
            settled=delivery.settled,
            attempts=delivery.attempts,
            status=delivery.status,
            error=delivery.error,
            next_try_at=time_or_none(delivery.next_at),
            delivered_at=time_or_none(delivery.delivered_at),
        )
