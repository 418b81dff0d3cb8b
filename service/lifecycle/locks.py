"""Locks on the home and on a SQLite database, so that one process at a time uses them."""

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import structlog
from filelock import FileLock, Timeout

from service.adapters.sql.database import sqlite_file
from service.config.settings import Settings
from service.errors import DatabaseUnusable, HomeInUse, HomeUnusable

log = structlog.get_logger(__name__)


@contextmanager
def locked(settings: Settings) -> Iterator[None]:
    """Lock the home and the SQLite database. Raises HomeInUse, HomeUnusable, DatabaseUnusable."""
    with ExitStack() as stack:
        try:
            settings.make_home()
            close_to_others(settings.home)
            for path, refusal in _locks(settings):
                stack.enter_context(_lock(path, refusal))
        except OSError as error:
            what = f"{error.filename}: {error.strerror}; set TRAINSHED_HOME, and TRAINSHED_DATABASE_URL if it is set, "
            raise HomeUnusable(f"{what}to writable folders") from error
        yield


def close_to_others(home: Path) -> None:
    """Make the home private if all users may enter it: it contains the database, logs and samples. Log the change.

    Permissions for the home's group are the operator's choice and stay. Another user who owns the home can replace its
    files: log that, too.
    """
    found = home.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o007 and found.st_uid in (os.geteuid(), 0):
        return
    if found.st_uid == os.geteuid() and not mode & stat.S_ISVTX and str(home) not in (os.path.expanduser("~"), "/"):
        home.chmod(0o700)
        log.warning("home_made_private", home=str(home), mode=f"{mode:04o}", now="0700")
    else:
        remedy = "set TRAINSHED_HOME to a folder of this user with mode 0700"
        log.warning("home_open_to_others", home=str(home), mode=f"{mode:04o}", owner=found.st_uid, remedy=remedy)


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
    """Yield the lock files, each with the error message of a second service."""
    yield settings.home / "service.lock", f"Another service uses {settings.home}; stop it, or set TRAINSHED_HOME"
    database = sqlite_file(settings.database)
    if database is not None:
        # The lock file is next to the database file, not next to a symbolic link to it.
        database = database.resolve()
        _refuse_second_names(database)
        # Writers of SQLite block each other, so leases would not separate two services.
        yield (
            database.with_name(f"{database.name}.lock"),
            f"Another service uses the SQLite database {database}; to run several services, set "
            "TRAINSHED_DATABASE_URL to a Postgres database",
        )
