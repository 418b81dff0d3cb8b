"""`trainshed backup` and `restore`: the embedded database and the operator's key as one file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import ServiceError
from trainshed.cli.connect import load_settings
from trainshed.cli.exit_codes import fail
from trainshed.cli.lazy import lazily
from trainshed.cli.options import AsJson
from trainshed.cli.output.printing import show_json, show_next, show_note, show_text
from trainshed.cli.process import require_service

if TYPE_CHECKING:
    from service import backup as archive
else:
    # Loads the database libraries, which would slow down all other commands.
    archive = lazily("service.backup")


def backup(file: Annotated[Path, typer.Argument(help="path of the new .tar file")], as_json: AsJson = False) -> None:
    """Back up the embedded database and the admin key. The service may be running."""
    config = load_settings()
    require_service()
    with _readable():
        made = archive.back_up(config, file.absolute())
    if as_json:
        show_json(made)
        return
    show_text(str(file))
    if made.holds_secret_key:
        show_note("it holds the admin key and the key that decrypts webhook secrets: keep it safe")
    else:
        show_note("it holds the admin key: keep it safe")
        show_note("it does not hold the key that decrypts webhook secrets: keep TRAINSHED_SECRET_KEY, too")
    show_next(f"restore {file}")


def restore(
    file: Annotated[Path, typer.Argument(help="file from `trainshed backup`")],
    force: Annotated[bool, typer.Option("--force", help="replace an existing database; the old one is kept")] = False,
    as_json: AsJson = False,
) -> None:
    """Restore a backup into the home of a stopped service."""
    config = load_settings()
    require_service()
    with _readable():
        done = archive.restore(config, file.absolute(), force=force)
    if as_json:
        show_json(done)
        return
    for path in done.kept:
        show_text(f"kept {path}")
    show_note(f"restored {file}; the service resumes its jobs at the next start")
    if not done.backup.holds_secret_key:
        show_note("it did not hold the key that decrypts webhook secrets: set TRAINSHED_SECRET_KEY as before")
    show_next("up")


@contextmanager
def _readable() -> Iterator[None]:
    """Turn a ServiceError or OSError into a one-line error and exit code 1."""
    try:
        yield
    except (ServiceError, OSError) as error:
        fail(str(error))
