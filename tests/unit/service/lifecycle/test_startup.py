"""Database startup while the service listens: retry if it is unreachable, give up if it is unusable."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from service.adapters.sql.database import Database, open_database
from service.errors import DatabaseUnreachable, DatabaseUnusable, ServiceError
from service.lifecycle.lifespan import Background, Part
from service.lifecycle.shutdown import Shutdown
from service.lifecycle.startup import DatabaseStartup, opened
from tests.support.waiting import wait_for


def failing(*errors: Exception) -> Callable[[], None]:
    """Return a function that raises each of `errors` once and then succeeds."""
    left = list(errors)

    def prepare() -> None:
        if left:
            raise left.pop(0)

    return prepare


def error_codes(startup: DatabaseStartup) -> tuple[str | None, str | None]:
    """Return the codes of the error for callers and of the final error."""
    return tuple(error and error.code for error in (startup.trouble, startup.hopeless))  # type: ignore[return-value]


def test_unreachable_database_is_retried() -> None:
    startup = DatabaseStartup(failing(DatabaseUnreachable("not now")), retry_seconds=60.0)
    assert error_codes(startup) == ("migrating", None)
    assert startup.run(threading.Event())
    assert error_codes(startup) == (None, None)


@pytest.mark.parametrize(
    ("error", "retry_seconds", "code"),
    [
        (DatabaseUnreachable("never"), 0.0, "database_unreachable"),
        (DatabaseUnusable("a wrong URL"), 60.0, "database_unusable"),
        (ZeroDivisionError("a bug"), 60.0, "database_unusable"),
    ],
)
def test_opening_gives_up_after_timeout_or_if_database_is_unusable(
    error: Exception, retry_seconds: float, code: str
) -> None:
    startup = DatabaseStartup(failing(error), retry_seconds=retry_seconds)
    assert not startup.run(threading.Event())
    assert error_codes(startup) == (code, code)
    assert str(error) in str(startup.hopeless)


def startup_error(url: str) -> ServiceError:
    with pytest.raises((DatabaseUnreachable, DatabaseUnusable)) as caught:
        Database(url).bring_up_to_date()
    return caught.value


@pytest.mark.parametrize(
    "url",
    [
        "no url",
        "nonsense://x",
        "postgresql://a:b@c:port/d",
        "sqlite:////nowhere/at/all.db",
        "sqlite:///file:x?uri=true",
    ],
)
def test_invalid_database_url_names_its_setting(url: str) -> None:
    assert "TRAINSHED_DATABASE_URL" in str(startup_error(url))


def test_damaged_or_newer_sqlite_file_is_unusable(tmp_path: Path) -> None:
    file = tmp_path / "t.db"
    file.write_bytes(b"x" * 8192)
    assert "file is not a database" in str(startup_error(f"sqlite:///{file}"))
    file.unlink()
    open_database(f"sqlite:///{file}").dispose()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    found = startup_error(f"sqlite:///{file}")
    assert isinstance(found, DatabaseUnusable)
    assert "is at schema revision 9999, and this version of Trainshed knows revisions up to" in str(found)


def test_refused_connection_is_unreachable_and_missing_role_is_unusable(postgres: str) -> None:
    away = startup_error("postgresql+psycopg://shed:secret@127.0.0.1:9/postgres")
    assert isinstance(away, DatabaseUnreachable)
    assert "secret" not in str(away)
    assert isinstance(startup_error("postgresql+psycopg://shed@127.0.0.1:99999/postgres"), DatabaseUnusable)
    assert isinstance(startup_error(postgres.replace("shed@", "nobody@")), DatabaseUnusable)
    assert isinstance(startup_error(f"{postgres}_none"), DatabaseUnusable)


def test_parts_start_in_order_and_end_in_reverse_even_if_some_hang_or_fail() -> None:
    calls, gate = list[str](), threading.Event()

    def part(name: str, stop: Callable[[], object] = lambda: None) -> Part:
        def end() -> None:
            calls.append(f"-{name}")
            stop()

        return Part(name, lambda: calls.append(f"+{name}"), end, seconds=0.2)

    startup, shutdown = DatabaseStartup(gate.wait, retry_seconds=60.0), Shutdown()
    parts = [part("one"), part("two", threading.Event().wait)]
    background = Background(parts, [part("three", lambda: 1 / 0)], startup, shutdown)
    background.start()
    assert calls == ["+one", "+two"]
    gate.set()
    wait_for(lambda: len(calls) == 3)
    background.end()
    assert calls == ["+one", "+two", "+three", "-three", "-two", "-one"]
    assert shutdown.is_set()
    assert shutdown.waits_for == "process exit"


def test_parts_do_not_start_once_the_service_is_leaving() -> None:
    calls, shutdown = list[str](), Shutdown()
    late = Part("late", lambda: calls.append("+late"), lambda: None, seconds=0.2)
    shutdown.set()
    background = Background([late], [late], opened(), shutdown)
    background.start()
    background.end()
    assert calls == []
