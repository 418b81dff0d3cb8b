"""`trainshed webhooks …`: webhooks for a project's job events, and their deliveries."""

from typing import Annotated

import typer

from service.api.schemas import NewWebhook, WebhookIn
from service.domain.jobs.job import JobState
from trainshed.cli.connect import connect
from trainshed.cli.exit_codes import Exit
from trainshed.cli.ids import complete_webhook, find_webhook
from trainshed.cli.options import AsJson, checked
from trainshed.cli.output.printing import Gone, show_json, show_next, show_note, show_text
from trainshed.cli.output.webhooks import show_deliveries, show_trial, show_webhook, show_webhooks

app = typer.Typer(no_args_is_help=True, help="Manage webhooks for state changes of jobs.")

_HELP = "a webhook's id, or enough of its beginning"
Hook = Annotated[str, typer.Argument(metavar="WEBHOOK", help=_HELP, autocompletion=complete_webhook)]


@app.command()
def create(
    url: Annotated[str, typer.Argument(metavar="URL", help="public https:// URL of the receiver")],
    project: Annotated[str, typer.Option(help="project whose job events are sent; * for all")],
    state: Annotated[
        list[JobState] | None, typer.Option(help="states that trigger an event [default: all]", case_sensitive=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a webhook and print its secret, which is not shown again."""
    given = {"url": url, "project": project, "states": state or []}
    request = checked(WebhookIn, given, "see `trainshed webhooks create --help`")
    with connect() as api:
        made = api.create_webhook(request)
    _show_secret(made, as_json)


@app.command()
def ls(project: Annotated[str | None, typer.Option(help="only this project")] = None, as_json: AsJson = False) -> None:
    """List the webhooks of projects that you administer, newest first."""
    with connect() as api:
        answer = api.webhooks(project=project)
    if as_json:
        show_json(answer)
        return
    show_webhooks(answer.data)
    show_next(f"webhooks show {answer.data[0].id}" if answer.data else "webhooks create URL --project PROJECT")


@app.command()
def show(webhook: Hook, as_json: AsJson = False) -> None:
    """Show the details of a webhook."""
    with connect() as api:
        found = api.webhook(find_webhook(api, webhook))
    if as_json:
        show_json(found)
        return
    show_webhook(found)
    show_next(f"webhooks {'deliveries' if found.disabled_at is None else 'test'} {found.id}")


@app.command()
def rm(webhook: Hook, as_json: AsJson = False) -> None:
    """Delete a webhook and its pending deliveries."""
    with connect() as api:
        webhook_id = find_webhook(api, webhook)
        api.delete_webhook(webhook_id)
    if as_json:
        show_json(Gone(id=webhook_id))
        return
    show_text(f"deleted {webhook_id}")
    show_next("webhooks ls")


@app.command("test")
def send_test(webhook: Hook, as_json: AsJson = False) -> None:
    """Send a test message at once. Exits with 1 if it is not received; enables a disabled webhook if it is."""
    with connect() as api:
        webhook_id = find_webhook(api, webhook)
        trial = api.test_webhook(webhook_id)
    if as_json:
        show_json(trial)
    else:
        show_trial(webhook_id, trial)
        show_next(f"webhooks {'deliveries' if trial.received else 'show'} {webhook_id}")
    raise typer.Exit(Exit.DONE if trial.received else Exit.FAILED)


@app.command()
def rotate(webhook: Hook, as_json: AsJson = False) -> None:
    """Rotate the signing secret and print it; the old one stays valid for 24 hours."""
    with connect() as api:
        made = api.rotate_webhook(find_webhook(api, webhook))
    _show_secret(made, as_json)


@app.command()
def deliveries(
    webhook: Hook,
    after: Annotated[int | None, typer.Option(min=1, help="`next` of the previous page")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    as_json: AsJson = False,
) -> None:
    """List the deliveries of the last seven days and the pending ones, newest first."""
    with connect() as api:
        webhook_id = find_webhook(api, webhook)
        page = api.deliveries(webhook_id, after=after, limit=limit)
    if as_json:
        show_json(page)
        return
    show_deliveries(page.data)
    if page.has_more:
        show_next(f"webhooks deliveries {webhook_id} --after {page.next}")
    else:
        show_next(
            f"webhooks redeliver {webhook_id} {page.data[0].number}" if page.data else f"webhooks test {webhook_id}"
        )


@app.command()
def redeliver(
    webhook: Hook,
    number: Annotated[int, typer.Argument(min=1, help="number of a delivery, from `trainshed webhooks deliveries`")],
    as_json: AsJson = False,
) -> None:
    """Queue a message to be sent again."""
    with connect() as api:
        webhook_id = find_webhook(api, webhook)
        delivery = api.redeliver(webhook_id, number)
    if as_json:
        show_json(delivery)
        return
    show_text(f"{number} of {webhook_id} is sent again")
    show_next(f"webhooks deliveries {webhook_id}")


def _show_secret(made: NewWebhook, as_json: bool) -> None:
    if as_json:
        show_json(made)
        return
    show_text(made.secret)
    show_note(f"{made.webhook.id}; keep the line above, it is not shown again")
    show_next(f"webhooks test {made.webhook.id}")
