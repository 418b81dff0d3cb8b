"""/webhooks: webhooks for job events, and their deliveries."""

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Path, Query, Request

from service.api.authentication import CallerIs
from service.api.bodies import parse_body, read_body
from service.api.concurrency_limits import Claim, FairThreads
from service.api.convert import delivery_out, new_webhook, trial_out, webhook_out
from service.api.openapi import json_body
from service.api.schemas import DeliveryOut, NewWebhook, Page, TrialOut, WebhookIn, WebhookOut, WebhooksOut
from service.domain.jobs.job import JobState
from service.use_cases.webhooks.webhooks import Webhooks

router = APIRouter(prefix="/webhooks", tags=["webhooks"])
_HIGHEST = 2**62


async def webhooks_of(request: Request) -> Webhooks:
    """Return the use cases of the app that serves this request."""
    webhooks: Webhooks = request.app.state.webhooks
    return webhooks


UseCases = Annotated[Webhooks, Depends(webhooks_of)]
WebhookId = Annotated[str, Path(max_length=64)]


@router.post("", status_code=201, openapi_extra=json_body(WebhookIn, required=True))
def create(caller: CallerIs, webhooks: UseCases, body: Annotated[bytes, Depends(read_body)]) -> NewWebhook:
    """Create a webhook for a project that the caller administers. Its secret is shown only once."""
    wanted = parse_body(WebhookIn, body)
    states = list(map(JobState, wanted.states))
    return new_webhook(webhooks.create(caller, wanted.project, wanted.url, states))


@router.get("")
def list_webhooks(caller: CallerIs, webhooks: UseCases, project: str | None = None) -> WebhooksOut:
    """List the webhooks of projects that the caller administers, newest first."""
    return WebhooksOut(data=[webhook_out(webhook) for webhook in webhooks.visible(caller, project)])


@router.get("/{webhook_id}")
def get(caller: CallerIs, webhooks: UseCases, webhook_id: WebhookId) -> WebhookOut:
    """Get a webhook."""
    return webhook_out(webhooks.find(caller, webhook_id))


@router.delete("/{webhook_id}", status_code=204)
def delete(caller: CallerIs, webhooks: UseCases, webhook_id: WebhookId) -> None:
    """Delete a webhook and its pending deliveries."""
    webhooks.delete(caller, webhook_id)


@router.post("/{webhook_id}/test")
async def test(request: Request, caller: CallerIs, webhooks: UseCases, webhook_id: WebhookId) -> TrialOut:
    """Send a test message at once and return the result. A disabled webhook that receives it is enabled."""
    # Separate threads, shared by project: a receiver may respond slowly.
    threads: FairThreads = request.app.state.webhook_tests
    claim = Claim(caller.id, (await run_sync(webhooks.find, caller, webhook_id)).project)
    return trial_out(await threads.run(request, claim, lambda _: webhooks.test(caller, webhook_id)))


@router.post("/{webhook_id}/rotate")
def rotate(caller: CallerIs, webhooks: UseCases, webhook_id: WebhookId) -> NewWebhook:
    """Rotate the signing secret; the new one is shown only once. For 24 hours, the old one signs requests too."""
    return new_webhook(webhooks.rotate(caller, webhook_id))


@router.get("/{webhook_id}/deliveries")
def deliveries(
    caller: CallerIs,
    webhooks: UseCases,
    webhook_id: WebhookId,
    after: Annotated[int | None, Query(ge=1, le=_HIGHEST, description="`next` of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[DeliveryOut]:
    """List the deliveries of the last seven days and the pending ones, newest first."""
    found, more = webhooks.deliveries(caller, webhook_id, after=after, limit=limit)
    return Page(data=[delivery_out(one) for one in found], has_more=more, next=str(found[-1].number) if more else None)


@router.post("/{webhook_id}/deliveries/{number}/redeliver")
def redeliver(
    caller: CallerIs, webhooks: UseCases, webhook_id: WebhookId, number: Annotated[int, Path(ge=1, le=_HIGHEST)]
) -> DeliveryOut:
    """Queue a message to be sent again."""
    return delivery_out(webhooks.redeliver(caller, webhook_id, number))
