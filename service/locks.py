"""What one process at a time may have: a home, and a SQLite database."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from service.adapters.sql.database import sqlite_file
from service.errors import HomeInUse, HomeUnusable
from service.settings import Settings


@contextmanager
def locked(settings: Settings) -> Iterator[None]:
    """Have the home and the database to oneself. Raises HomeInUse, HomeUnusable, DatabaseUnusable."""
    with ExitStack() as stack:
        try:
            settings.make_home()
            for path, refusal in _locks(settings):
                stack.enter_context(_lock(path, refusal))
        except OSError as error:
            what = f"{error.filename}: {error.strerror}; set TRAINSHED_HOME, and TRAINSHED_DATABASE_URL if it is set, "
            raise HomeUnusable(f"{what}to folders that may be written to") from error
        yield


def _lock(path: Path, refusal: str) -> AbstractContextManager[object]:
    try:
        return FileLock(path).acquire(timeout=0)
    except Timeout as error:
        raise HomeInUse(refusal) from error


def _locks(settings: Settings) -> Iterator[tuple[Path, str]]:
    """What one service at a time may have, and what the next one is told."""
    yield settings.home / "service.lock", f"Another service uses {settings.home}; stop it, or set TRAINSHED_HOME"
    database = sqlite_file(settings.database)
    if database is not None:
        # Its writers would wait for each other, and for nobody's leases.
        yield (
            database.with_name(f"{database.name}.lock"),
            f"Another service uses the SQLite database {database}; several services share a Postgres one, "
            "which TRAINSHED_DATABASE_URL names",
        )
