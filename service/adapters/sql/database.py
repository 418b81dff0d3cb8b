"""The database: one engine, and a schema that is migrated at startup."""

import re
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any, cast

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Dialect, Engine, create_engine, event, func, inspect, make_url, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, SQLAlchemyError, TimeoutError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection, QueuePool

from service.adapters.sql.faults import DatabaseStatus
from service.adapters.sql.tables import metadata
from service.errors import DatabaseUnreachable, DatabaseUnusable, ServiceError
from train_loop.extras import cannot_import

CALL_SECONDS = 10.0
"""Default time limit of a statement, in seconds."""
_STATUS = "trainshed_status"
_LOCK = 7_451_966
"""Key of the advisory lock for migrations: an arbitrary number, the same in every version."""
_MIGRATIONS = Path(__file__).parent / "migrations"
_CONNECT_TIMEOUTS = {
    "connect_timeout": 5,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    # Milliseconds.
    "tcp_user_timeout": 30_000,
}
_NEVER = re.compile(
    "password authentication failed|no password supplied|connection is bad: invalid|does not exist"
    "|unable to open database file|readonly database"
)
"""Database errors that a retry cannot fix."""


class Database:
    """One engine, which connects at first use, and the schema that the code expects.

    Raises DatabaseUnusable if the URL cannot be used.
    """

    def __init__(self, url: str, *, seconds: float = CALL_SECONDS) -> None:
        """Create the engine. `seconds` is the timeout of each statement, and of the wait for a connection or a lock."""
        self.url = url
        try:
            self.engine = _engine(url, seconds)
        except ImportError as error:
            raise DatabaseUnusable(cannot_import("TRAINSHED_DATABASE_URL", "psycopg", error)) from error
        except (SQLAlchemyError, ValueError) as error:
            raise DatabaseUnusable(f"TRAINSHED_DATABASE_URL is not the URL of a usable database: {error}") from error

    def bring_up_to_date(self) -> None:
        """Migrate the schema. Raises DatabaseUnreachable if a retry may help, else DatabaseUnusable."""
        try:
            _bring_up_to_date(self.url, "head")
        except SQLAlchemyError as error:
            raise _judged(self.url, error) from error
        file = sqlite_file(self.url)
        if file is not None and file.exists():
            # The file holds the secrets that sign webhooks, and other users may have access to its folder.
            file.chmod(0o600)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.engine.dispose()


def _engine(url: str, seconds: float = CALL_SECONDS) -> Engine:
    file = sqlite_file(url)
    status = DatabaseStatus(file)
    engine = create_engine(
        url,
        # A SQLite file needs no check before use: it does not disconnect between two requests.
        pool_pre_ping=file is None,
        connect_args=_connect_timeouts(url),
        poolclass=_Pool,
        pool_timeout=seconds,
        # Rows hold specs and secrets: errors and log lines must not contain their values.
        hide_parameters=True,
        execution_options={_STATUS: status},
    )
    event.listen(engine, "handle_error", status.translate)
    if engine.dialect.name == "sqlite":
        given = make_url(url).query.get("timeout")
        milliseconds = round(float(given if isinstance(given, str) else seconds) * 1000)
        event.listen(engine, "connect", partial(_make_durable, milliseconds=milliseconds))
    else:
        event.listen(engine, "do_connect", partial(_connect_to_postgres, status, seconds))
    return engine


def status_of(engine: Engine) -> DatabaseStatus:
    """Return the status of the engine's database."""
    status = engine.get_execution_options()[_STATUS]
    assert isinstance(status, DatabaseStatus)
    return status


class _Pool(QueuePool):
    """A pool of connections with a time limit for the wait of each caller."""

    def connect(self) -> PoolProxiedConnection:
        """Return a connection. Raises DatabaseUnreachable if all are in use for too long."""
        try:
            return super().connect()
        except TimeoutError as error:
            raise DatabaseUnreachable.because("all connections to it are in use") from error


def _connect_to_postgres(
    status: DatabaseStatus,
    seconds: float,
    dialect: Dialect,
    record: ConnectionPoolEntry,
    arguments: list[str],
    options: dict[str, Any],
) -> DBAPIConnection:
    # The driver is an optional dependency.
    from service.adapters.sql.time_limit import TimedConnection  # noqa: PLC0415

    with status.connecting():
        connection = TimedConnection.connect(*arguments, **options)
    # The server's limit is shorter, so that a slow statement releases its locks.
    connection.seconds = seconds + 1.0
    connection.execute(f"SET statement_timeout = {round(seconds * 1000)}")
    connection.commit()
    return cast("DBAPIConnection", connection)


def _connect_timeouts(url: str) -> dict[str, int]:
    """Return libpq's timeouts for a server that stops answering, unless the URL sets them."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "postgresql":
        return {}
    return {name: value for name, value in _CONNECT_TIMEOUTS.items() if name not in parsed.query}


def _judged(url: str, error: SQLAlchemyError) -> ServiceError:
    """Return the error of a failed migration: DatabaseUnreachable if a retry may help, else DatabaseUnusable."""
    shown = make_url(url).render_as_string(hide_password=True)
    message = " ".join(str(getattr(error, "orig", None) or error).split())
    if isinstance(error, OperationalError | InterfaceError | TimeoutError) and not _NEVER.search(message):
        return DatabaseUnreachable(f"the database {shown} does not answer: {message}; the service retries")
    return DatabaseUnusable(f"the database {shown} cannot be used: {message}; fix it, or set TRAINSHED_DATABASE_URL")


def open_database(url: str, *, revision: str = "head") -> Engine:
    """Migrate a database to the newest or to an older revision, and return its engine.

    Raises sqlalchemy.exc.SQLAlchemyError.
    """
    _bring_up_to_date(url, revision)
    return _engine(url)


def _bring_up_to_date(url: str, revision: str) -> None:
    """Migrate in one transaction, all or nothing."""
    engine = create_engine(url, poolclass=NullPool, connect_args=_connect_timeouts(url), hide_parameters=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _leave_transactions_to_us)
        event.listen(engine, "begin", _begin_at_once)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # If several services start at once, one migrates and the others wait.
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        _migrate(connection, config, revision)


def _leave_transactions_to_us(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
    """Disable the implicit commits of Python's driver: an interrupted migration would stay half done."""
    connection.isolation_level = None


def _begin_at_once(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def secret_key_beside(url: str) -> Path | None:
    """Return the default key file for the secrets of a SQLite database; None for other databases."""
    file = sqlite_file(url)
    # Resolved, so that a URL with a symbolic link leads to the same key.
    return None if file is None else file.resolve().with_name(f"{file.resolve().name}.key")


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite database; None for other databases. Raises DatabaseUnusable if the URL is invalid."""
    try:
        parsed = make_url(url)
    # A port that is not a number raises ValueError.
    except (ArgumentError, ValueError) as error:
        raise DatabaseUnusable(f"TRAINSHED_DATABASE_URL is not the URL of a database: {error}") from error
    if parsed.get_backend_name() == "sqlite" and (parsed.database or "").startswith("file:"):
        # The service could not detect that two such URLs name the same file.
        raise DatabaseUnusable("TRAINSHED_DATABASE_URL contains a file: URI; expected a path, sqlite:////PATH")
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def newest_revision() -> str:
    """Return the schema revision that the code expects."""
    return ScriptDirectory(str(_MIGRATIONS)).get_current_head() or ""


def _migrate(connection: Connection, config: Config, revision: str) -> None:
    now = MigrationContext.configure(connection).get_current_revision()
    newest = newest_revision()
    _check_ours(connection, now)
    # Revisions are numbers, so that they can be compared.
    if now is not None and now > newest:
        raise DatabaseUnusable(
            f"the database is at schema revision {now}, and this version of Trainshed knows revisions up to {newest}; "
            "run the version that migrated it, or a newer one, or restore a backup from before"
        )
    if revision != "head" and now is not None and now > revision:
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _check_ours(connection: Connection, now: str | None) -> None:
    """Raise DatabaseUnusable if another program uses the database. Change nothing in it."""
    remedy = "use a separate database for Trainshed (TRAINSHED_DATABASE_URL)"
    if now is None:
        foreign = sorted({*inspect(connection).get_table_names()} & metadata.tables.keys())
        if foreign:
            raise DatabaseUnusable(
                f"the database has tables that Trainshed did not create ({', '.join(foreign[:5])}); {remedy}"
            )
    elif not re.fullmatch(r"\d{4}", now) or now < "0001":
        raise DatabaseUnusable(f"the database is at schema revision {now[:40]!r} of another program; {remedy}")


def _make_durable(connection: sqlite3.Connection, record: ConnectionPoolEntry, *, milliseconds: int) -> None:
    """Set WAL, so that reads continue during a write, and FULL, so that a commit is on disk before it returns."""
    for pragma in (f"busy_timeout={milliseconds}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
