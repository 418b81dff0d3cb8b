"""Copies of a SQLite database that is in use, checks of them, and dump commands for Postgres."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from shlex import quote

from sqlalchemy import make_url

from service.adapters.sql.database import newest_revision
from service.errors import BackupFailed

_NOBODYS = (
    # Release all leases, so that a service that uses the copy need not wait for them.
    "UPDATE jobs SET lease_owner = NULL, lease_until = NULL",
    "DELETE FROM leases",
    # Keep all data in one file, without a WAL.
    "PRAGMA journal_mode = DELETE",
)


def copy_database(source: Path, target: Path) -> str:
    """Copy a consistent snapshot of a database, without leases. Return its schema revision. Raises BackupFailed.

    Concurrent writers do not wait.
    """
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=rw", uri=True, timeout=30)) as here,
            closing(sqlite3.connect(target, isolation_level=None)) as there,
        ):
            here.backup(there)
            for statement in _NOBODYS:
                there.execute(statement)
    except sqlite3.Error as error:
        raise BackupFailed(
            f"the database {source} could not be copied: {error}; start the service once, or repair the database"
        ) from error
    return check_database(target)


def check_database(file: Path) -> str:
    """Return the schema revision of a database. Raises BackupFailed if it is damaged, not Trainshed's, or too new."""
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as connection:
            integrity = connection.execute("PRAGMA integrity_check").fetchone()[0]
            revision = str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])
    except (sqlite3.Error, TypeError) as error:
        raise BackupFailed(f"{file.name} is not a Trainshed database: {error}; choose another backup") from error
    if integrity != "ok":
        raise BackupFailed(f"{file.name} is damaged: {integrity}; choose another backup")
    if revision > newest_revision():
        raise BackupFailed(
            f"{file.name} is at schema revision {revision}, and this version of Trainshed knows revisions up to "
            f"{newest_revision()}; restore it with the version that wrote it, or a newer one"
        )
    return revision


def settle(database: Path) -> None:
    """Merge the WAL of an unused database into its main file. Ignore errors."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{database.as_uri()}?mode=rw", uri=True)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")


def dump_command(url: str, file: Path) -> str:
    """Return the shell command that dumps a Postgres database into a file."""
    return f"pg_dump --format=custom --file={quote(str(file))} {quote(_libpq_url(url))}"


def restore_command(url: str, file: Path) -> str:
    """Return the shell command that restores a Postgres database from such a dump, in one transaction."""
    options = "--clean --if-exists --single-transaction"
    return f"pg_restore {options} --dbname={quote(_libpq_url(url))} {quote(str(file))}"


def _libpq_url(url: str) -> str:
    """Return a URL for Postgres' tools. It leaves out the password, which belongs in ~/.pgpass."""
    parsed = make_url(url)
    return parsed._replace(drivername=parsed.get_backend_name(), password=None).render_as_string()
