"""The database is opened while the service listens: again where it does not answer, never where it cannot work."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from service.adapters.sql.database import Database, open_database
from service.errors import DatabaseUnreachable, DatabaseUnusable, ServiceError
from service.lifecycle.lifespan import Background, Part
from service.lifecycle.shutdown import Leaving
from service.lifecycle.startup import Opening, opened
from tests.support.waiting import wait_for


def failing(*errors: Exception) -> Callable[[], None]:
    """Something that fails so often, and works from then on."""
    left = list(errors)

    def prepare() -> None:
        if left:
            raise left.pop(0)

    return prepare


def told(opening: Opening) -> tuple[str | None, str | None]:
    """What callers are told, and why it is given up."""
    return tuple(error and error.code for error in (opening.trouble, opening.hopeless))  # type: ignore[return-value]


def test_database_that_does_not_answer_is_asked_again() -> None:
    opening = Opening(failing(DatabaseUnreachable("not now")), patience=60.0)
    assert told(opening) == ("migrating", None)
    assert opening.run(threading.Event())
    assert told(opening) == (None, None)


@pytest.mark.parametrize(
    ("error", "patience", "code"),
    [
        (DatabaseUnreachable("never"), 0.0, "database_unreachable"),
        (DatabaseUnusable("a wrong URL"), 60.0, "database_unusable"),
        (ZeroDivisionError("a bug"), 60.0, "database_unusable"),
    ],
)
def test_database_that_can_never_work_is_given_up(error: Exception, patience: float, code: str) -> None:
    opening = Opening(failing(error), patience=patience)
    assert not opening.run(threading.Event())
    assert told(opening) == (code, code)
    assert str(error) in str(opening.hopeless)


def judged(url: str) -> ServiceError:
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
def test_urls_that_name_no_database(url: str) -> None:
    assert "TRAINSHED_DATABASE_URL" in str(judged(url))


def test_files_that_are_no_database_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "t.db"
    file.write_bytes(b"x" * 8192)
    assert "file is not a database" in str(judged(f"sqlite:///{file}"))
    file.unlink()
    open_database(f"sqlite:///{file}").dispose()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    found = judged(f"sqlite:///{file}")
    assert isinstance(found, DatabaseUnusable)
    assert "is at schema revision 9999, and this version of Trainshed knows revisions up to" in str(found)


def test_postgres_that_is_not_there_may_come_and_a_role_that_is_not_there_does_not(postgres: str) -> None:
    away = judged("postgresql+psycopg://shed:secret@127.0.0.1:9/postgres")
    assert isinstance(away, DatabaseUnreachable)
    assert "secret" not in str(away)
    assert isinstance(judged("postgresql+psycopg://shed@127.0.0.1:99999/postgres"), DatabaseUnusable)
    assert isinstance(judged(postgres.replace("shed@", "nobody@")), DatabaseUnusable)
    assert isinstance(judged(f"{postgres}_none"), DatabaseUnusable)


def test_parts_are_started_once_they_can_and_ended_the_last_first_though_some_hang_or_fail() -> None:
    said, gate = list[str](), threading.Event()

    def part(name: str, stop: Callable[[], object] = lambda: None) -> Part:
        def end() -> None:
            said.append(f"-{name}")
            stop()

        return Part(name, lambda: said.append(f"+{name}"), end, seconds=0.2)

    opening, leaving = Opening(gate.wait, patience=60.0), Leaving()
    parts = [part("one"), part("two", threading.Event().wait)]
    background = Background(parts, [part("three", lambda: 1 / 0)], opening, leaving)
    background.start()
    assert said == ["+one", "+two"]
    gate.set()
    wait_for(lambda: len(said) == 3)
    background.end()
    assert said == ["+one", "+two", "+three", "-three", "-two", "-one"]
    assert leaving.is_set()
    assert leaving.waits_for == "process exit"


def test_nothing_starts_any_more_once_the_service_leaves() -> None:
    said, leaving = list[str](), Leaving()
    late = Part("late", lambda: said.append("+late"), lambda: None, seconds=0.2)
    leaving.set()
    background = Background([late], [late], opened(), leaving)
    background.start()
    background.end()
    assert said == []
