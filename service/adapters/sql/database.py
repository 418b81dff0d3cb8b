"""The database: one engine, and its schema brought up to date at start."""

import sqlite3
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import ConnectionPoolEntry

_MIGRATIONS = Path(__file__).parent / "migrations"


def open_database(url: str) -> Engine:
    """An engine whose tables are those that the code expects. Raises sqlalchemy.exc.SQLAlchemyError."""
    engine = create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _make_durable)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return engine


def _make_durable(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
    """WAL lets readers read while one writes; FULL has a commit on disk before it returns."""
    for pragma in ("busy_timeout=30000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
