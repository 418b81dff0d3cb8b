"""The database: one engine, and its schema brought up to date at start."""

import sqlite3
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

_LOCK = 7_451_966
"""Any number; the same for every version."""
_MIGRATIONS = Path(__file__).parent / "migrations"


class Database:
    """One engine, which connects when it is first asked, and the schema that the code expects."""

    def __init__(self, url: str) -> None:
        self.url = url
        # A file does not go away between two requests.
        self.engine = create_engine(url, pool_pre_ping=sqlite_file(url) is None)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _make_durable)

    def bring_up_to_date(self) -> None:
        """Migrate. Raises sqlalchemy.exc.SQLAlchemyError."""
        _bring_up_to_date(self.url, "head")

    def close(self) -> None:
        """Let go of what is not in use."""
        self.engine.dispose()


def open_database(url: str, *, revision: str = "head") -> Engine:
    """An engine whose tables are those that the code expects, or those of an older revision.

    Raises sqlalchemy.exc.SQLAlchemyError.
    """
    _bring_up_to_date(url, revision)
    return Database(url).engine


def _bring_up_to_date(url: str, revision: str) -> None:
    """Migrate in one transaction, all or nothing."""
    engine = create_engine(url, poolclass=NullPool)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _leave_transactions_to_us)
        event.listen(engine, "begin", _begin_at_once)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # Of several that start at once, one migrates and the others wait.
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        _migrate(connection, config, revision)


def _leave_transactions_to_us(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
    """Python's driver commits before it changes a table: a migration that is cut off would stay half done."""
    connection.isolation_level = None


def _begin_at_once(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for any other."""
    parsed = make_url(url)
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def _migrate(connection: Connection, config: Config, revision: str) -> None:
    now = MigrationContext.configure(connection).get_current_revision()
    # Revisions are numbers, so that they compare.
    if revision != "head" and now is not None and now > revision:
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _make_durable(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
    """WAL lets readers read while one writes; FULL has a commit on disk before it returns."""
    for pragma in ("busy_timeout=30000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
