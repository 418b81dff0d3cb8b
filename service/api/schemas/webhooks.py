"""Request and response models of webhooks and their deliveries."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from service.api.schemas.access import Project
from service.api.schemas.common import StateName, Time
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import DeliveryStatus


class WebhookIn(BaseModel):
    """A request to create a webhook."""

    model_config = ConfigDict(extra="forbid")

    project: Project = Field(description="project whose job events are sent; `*` for all")
    url: str = Field(min_length=1, max_length=2048, description="an https:// URL on the public internet")
    states: Sequence[StateName] = Field(
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


class NewWebhook(BaseModel):
    """A webhook and its new secret."""

    webhook: WebhookOut
    secret: str = Field(description="key to verify signatures; it is not shown again")


class WebhooksOut(BaseModel):
    """Webhooks, newest first."""

    data: list[WebhookOut]


class TrialOut(BaseModel):
    """The result of a test message."""

    received: bool
    status: int | None = Field(description="HTTP status of the response; null if there was none")
    error: str | None


class DeliveryOut(BaseModel):
    """The delivery of a message to a webhook."""

    number: int
    message_id: str = Field(description="the header webhook-id, the same in each attempt")
    event: str
    job_id: str
    created_at: Time
    settled: DeliveryStatus
    attempts: int
    status: int | None = Field(description="HTTP status of the last response; null if there was none")
    error: str | None = Field(description="why the last attempt failed")
    next_try_at: Time | None
    delivered_at: Time | None
