"""Text output of webhooks and their deliveries."""

from collections.abc import Iterable

from service.api.schemas import DeliveryOut, TrialOut, WebhookOut
from service.domain.jobs.job import JobState
from trainshed.cli.output.printing import show_facts, show_table, show_text


def show_webhooks(webhooks: Iterable[WebhookOut]) -> None:
    """Print webhooks, one per row."""
    rows = (
        (one.id, one.project, f"{one.created_at:%F}", "disabled" if one.disabled_at else "", _states(one), one.url)
        for one in webhooks
    )
    show_table(("id", "project", "created", "", "states", "url"), rows)


def show_webhook(webhook: WebhookOut) -> None:
    """Print a webhook, one fact per line."""
    until, disabled = webhook.previous_secret_until, webhook.disabled_at
    show_facts(
        {
            "id": webhook.id,
            "project": webhook.project,
            "url": webhook.url,
            "states": _states(webhook),
            "created": f"{webhook.created_at:%F %T} by {webhook.created_by}",
            "former secret until": until and f"{until:%F %T}",
            "disabled": disabled and f"{disabled:%F %T}: {webhook.disabled_because}",
        }
    )


def show_trial(webhook_id: str, trial: TrialOut) -> None:
    """Print the result of a test message."""
    show_text(f"{webhook_id} has received it" if trial.received else f"{webhook_id} has not received it: {trial.error}")


def show_deliveries(deliveries: Iterable[DeliveryOut]) -> None:
    """Print deliveries, one per row."""
    rows = (
        (str(one.number), f"{one.created_at:%F %T}", one.job_id, one.settled, str(one.attempts), _outcome(one))
        for one in deliveries
    )
    show_table(("number", "time", "job", "", "attempts", "outcome"), rows)


def _states(webhook: WebhookOut) -> str:
    return "all" if len(webhook.states) == len(JobState) else " ".join(webhook.states)


def _outcome(delivery: DeliveryOut) -> str:
    next_try = f"next try {delivery.next_try_at:%F %T}" if delivery.next_try_at else None
    return ": ".join(filter(None, (next_try, delivery.error)))
