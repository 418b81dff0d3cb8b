"""What one process at a time may have: a home, and a SQLite database."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from service.adapters.sql.database import sqlite_file
from service.errors import DatabaseUnusable, HomeInUse, HomeUnusable
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


def _refuse_second_names(database: Path) -> None:
    """Raise DatabaseUnusable if the file has a hard link: services could open it by either name, each with a lock."""
    names = database.stat().st_nlink if database.exists() else 1
    if names > 1:
        raise DatabaseUnusable(
            f"the SQLite database {database} has {names} names (hard links), and SQLite damages such a file; "
            "keep one name"
        )


def _locks(settings: Settings) -> Iterator[tuple[Path, str]]:
    """What one service at a time may have, and what the next one is told."""
    yield settings.home / "service.lock", f"Another service uses {settings.home}; stop it, or set TRAINSHED_HOME"
    database = sqlite_file(settings.database)
    if database is not None:
        # The lock lies beside the file, and not beside a symbolic link to it.
        database = database.resolve()
        _refuse_second_names(database)
        # Its writers would wait for each other, and for nobody's leases.
        yield (
            database.with_name(f"{database.name}.lock"),
            f"Another service uses the SQLite database {database}; several services share a Postgres one, "
            "which TRAINSHED_DATABASE_URL names",
        )
