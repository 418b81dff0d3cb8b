"""`trainshed keys …` and `whoami`: API keys and their roles."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from service.api.schemas import KeyIn
from service.domain.access.roles import Role
from trainshed.cli.connect import connect
from trainshed.cli.ids import complete_key, find_key_id
from trainshed.cli.options import AsJson, checked
from trainshed.cli.output.access import show_keys, show_me
from trainshed.cli.output.printing import Gone, show_json, show_next, show_note, show_text

app = typer.Typer(no_args_is_help=True, help="Manage API keys and their roles in projects.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="name of its holder")],
    role: Annotated[
        list[str],
        typer.Option(metavar="PROJECT=ROLE", help=f"role ({', '.join(Role)}) in a project; * for all projects"),
    ],
    days: Annotated[float | None, typer.Option(min=0, max=36500, help="days until it expires [default: never]")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print its secret, which is not shown again."""
    request = _key_request(name, role, None if days is None else datetime.now(UTC) + timedelta(days=days))
    with connect() as api:
        made = api.create_key(request)
    if as_json:
        show_json(made)
        return
    show_text(made.secret)
    show_note(f"{made.key.id}; keep the line above, it is not shown again")
    show_next("whoami (with TRAINSHED_KEY set to it)")


@app.command()
def ls(as_json: AsJson = False) -> None:
    """List the keys with a role in a project that you administer, newest first."""
    with connect() as api:
        answer = api.keys()
    if as_json:
        show_json(answer)
        return
    show_keys(answer.data)
    show_next("keys revoke KEY" if answer.data else "keys create NAME --role PROJECT=ROLE")


@app.command()
def revoke(
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="id of a key, or a unique prefix", autocompletion=complete_key),
    ],
    as_json: AsJson = False,
) -> None:
    """Revoke a key."""
    with connect() as api:
        key_id = find_key_id(api, key)
        api.revoke_key(key_id)
    if as_json:
        show_json(Gone(id=key_id))
        return
    show_text(f"revoked {key_id}")
    show_next("keys ls")


def whoami(as_json: AsJson = False) -> None:
    """Show the key in use and its roles."""
    with connect() as api:
        answer = api.me()
    if as_json:
        show_json(answer)
        return
    show_me(answer)
    show_next("ps")


def _key_request(name: str, roles: list[str], expires_at: datetime | None) -> KeyIn:
    """Build the request. Exits with a one-line error and code 2 if the options are invalid."""
    given = {project: role for project, _, role in (one.partition("=") for one in roles)}
    return checked(KeyIn, {"name": name, "roles": given, "expires_at": expires_at}, "write --role nlp=editor")
