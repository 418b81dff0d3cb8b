"""`trainshed keys …`, `whoami` and `audit`: who may call, and what callers did."""

import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from pydantic import ValidationError

from service.api.access_schemas import KeyIn
from service.cli.connect import connect
from service.cli.show import show_deeds, show_json, show_keys, show_me, show_note, show_text
from service.domain.access import Role

app = typer.Typer(no_args_is_help=True, help="Keys: who may call, and what they may do in which projects.")
AsJson = Annotated[bool, typer.Option("--json", help="the service's answer as it is")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="whose it is")],
    role: Annotated[
        list[str], typer.Option(metavar="PROJECT=ROLE", help=f"one of {', '.join(Role)}; * is any project")
    ],
    days: Annotated[float | None, typer.Option(min=0, help="until it is over; default: never")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print its secret, which is not shown again."""
    wish = _wish(name, role, None if days is None else datetime.now(UTC) + timedelta(days=days))
    with connect() as client:
        made = client.create_key(wish)
    if as_json:
        show_json(made)
        return
    show_text(made.secret)
    show_note(f"{made.key.id}; keep the line above, it is not shown again: TRAINSHED_KEY=… trainshed whoami")


@app.command()
def ls(as_json: AsJson = False) -> None:
    """List the keys that open a project of which one is an admin, newest first."""
    with connect() as client:
        answer = client.keys()
        show_json(answer) if as_json else show_keys(answer.data)


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(help="id of a key, as `trainshed keys ls` shows it")]) -> None:
    """Let a key open nothing from now on."""
    with connect() as client:
        client.revoke_key(key_id)
        show_text(f"{key_id} opens nothing any more")


def whoami(as_json: AsJson = False) -> None:
    """Show what the key in use opens."""
    with connect() as client:
        answer = client.me()
        show_json(answer) if as_json else show_me(answer)


def audit(
    project: Annotated[str | None, typer.Option(help="only this project")] = None,
    after: Annotated[int | None, typer.Option(min=1, help="`next` of the page before")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    as_json: AsJson = False,
) -> None:
    """Show who wrote what, newest first."""
    with connect() as client:
        page = client.audit(project=project, after=after, limit=limit)
        show_json(page) if as_json else show_deeds(page.data)


def _wish(name: str, roles: list[str], expires_at: datetime | None) -> KeyIn:
    """Ends the command with a readable line and exit code 1 where it makes no sense."""
    given = {project: role for project, _, role in (one.partition("=") for one in roles)}
    try:
        return KeyIn.model_validate({"name": name, "roles": given, "expires_at": expires_at})
    except ValidationError as error:
        for problem in error.errors():
            place = "/".join(map(str, problem["loc"]))
            print(f"trainshed: {place}: {problem['msg']}; write --role nlp=editor", file=sys.stderr)
        raise typer.Exit(1) from error
