"""The database: one engine, and its schema brought up to date at start."""

import sqlite3
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.pool import ConnectionPoolEntry

_MIGRATIONS = Path(__file__).parent / "migrations"


def open_database(url: str, *, revision: str = "head") -> Engine:
    """An engine whose tables are those that the code expects, or those of an older revision.

    Raises sqlalchemy.exc.SQLAlchemyError.
    """
    engine = create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _make_durable)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        _migrate(connection, config, revision)
    return engine


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
