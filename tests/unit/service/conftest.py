"""Fixture for a real Postgres server, one per module; skipped if its binaries are not installed."""

import shutil
from collections.abc import Iterator

import pytest

from tests.support.postgres import postgres_server


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("no Postgres binaries on this machine")
    pytest.importorskip("psycopg", reason="the Postgres driver is not installed")
    with postgres_server() as url:
        yield url
