"""Databases of tests."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine

from service.adapters.sql.database import open_database
from service.adapters.sql.tables import metadata


@contextmanager
def emptied(url: str) -> Iterator[Engine]:
    """Yield a database, and delete all its rows at the end."""
    engine = open_database(url)
    yield engine
    with engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    engine.dispose()
