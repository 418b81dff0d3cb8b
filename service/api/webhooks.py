"""/webhooks: who is told of jobs, and what became of it."""

from typing import Annotated

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Path, Query, Request

from service.api.describe import json_body
from service.api.guard import CallerIs, parse_body, read_body
from service.api.schemas import Page
from service.api.webhook_schemas import DeliveryOut, NewWebhook, TrialOut, WebhookIn, WebhookOut, WebhooksOut
from service.webhooks import Webhooks

router = APIRouter(prefix="/webhooks", tags=["webhooks"])
_HIGHEST = 2**62


async def webhooks_of(request: Request, caller: CallerIs) -> Webhooks:
    """The use cases for the caller of this request."""
    webhooks: Webhooks = request.app.state.webhooks
    return webhooks.of(caller)


UseCases = Annotated[Webhooks, Depends(webhooks_of)]
WebhookId = Annotated[str, Path(max_length=64)]


@router.post("", status_code=201, openapi_extra=json_body(WebhookIn, required=True))
def create(webhooks: UseCases, body: Annotated[bytes, Depends(read_body)]) -> NewWebhook:
    """Have somebody told of the jobs of a project of which one is an admin; the secret is shown this once."""
    wish = parse_body(WebhookIn, body)
    return NewWebhook.of(webhooks.create(wish.project, wish.url, wish.states))


@router.get("")
def list_webhooks(webhooks: UseCases, project: str | None = None) -> WebhooksOut:
    """The webhooks of projects of which one is an admin, newest first."""
    return WebhooksOut(data=[WebhookOut.of(webhook) for webhook in webhooks.visible(project)])


@router.get("/{webhook_id}")
def get(webhooks: UseCases, webhook_id: WebhookId) -> WebhookOut:
    """One of them."""
    return WebhookOut.of(webhooks.find(webhook_id))


@router.delete("/{webhook_id}", status_code=204)
def delete(webhooks: UseCases, webhook_id: WebhookId) -> None:
    """Tell it nothing any more, and forget what it was still to be told."""
    webhooks.delete(webhook_id)


@router.post("/{webhook_id}/test")
async def test(request: Request, webhooks: UseCases, webhook_id: WebhookId) -> TrialOut:
    """Send something at once, and say what came of it; one that is disabled and receives it is enabled."""
    # From threads that no other answer needs: a receiver may take its time.
    threads: CapacityLimiter = request.app.state.trials
    return TrialOut.of(await run_sync(webhooks.test, webhook_id, limiter=threads))


@router.post("/{webhook_id}/rotate")
def rotate(webhooks: UseCases, webhook_id: WebhookId) -> NewWebhook:
    """Another secret, shown this once; for a day each request is signed with the one before it, too."""
    return NewWebhook.of(webhooks.rotate(webhook_id))


@router.get("/{webhook_id}/deliveries")
def deliveries(
    webhooks: UseCases,
    webhook_id: WebhookId,
    after: Annotated[int | None, Query(ge=1, le=_HIGHEST, description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[DeliveryOut]:
    """What it was told in the last seven days or is to be told, newest first."""
    found, more = webhooks.deliveries(webhook_id, after=after, limit=limit)
    return Page(
        data=[DeliveryOut.of(one) for one in found], has_more=more, next=str(found[-1].number) if more else None
    )


@router.post("/{webhook_id}/deliveries/{number}/redeliver")
def redeliver(
    webhooks: UseCases, webhook_id: WebhookId, number: Annotated[int, Path(ge=1, le=_HIGHEST)]
) -> DeliveryOut:
    """Send a message again, as soon as its turn comes."""
    return DeliveryOut.of(webhooks.redeliver(webhook_id, number))
