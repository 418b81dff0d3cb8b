"""Databases of tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from service.adapters.sql.database import open_database
from service.adapters.sql.tables import metadata


def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of the database that a fixture's parameter names: `postgres`, or SQLite in the folder."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres"))
    return f"sqlite:///{tmp_path / 'jobs.db'}"


@contextmanager
def emptied(url: str) -> Iterator[Engine]:
    """Yield a database, and delete all its rows at the end."""
    engine = open_database(url)
    yield engine
    with engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    engine.dispose()
