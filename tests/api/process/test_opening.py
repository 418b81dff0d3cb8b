"""API answers while the database opens and while it hangs."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from service.api import readiness as module
from service.lifecycle.startup import DatabaseStartup
from tests.support.fakes.service import KEY, FakeService
from tests.support.fakes.stores import MemoryJobStore
from tests.support.servers.served import ended, environment_of, served
from tests.support.waiting import wait_for


class HangingStore(MemoryJobStore):
    """A store whose `ping` waits until `released` is set."""

    released = threading.Event()

    def ping(self) -> None:
        self.released.wait()


def test_calls_return_503_until_the_database_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOLD_SECONDS", 0.1)
    startup = DatabaseStartup(lambda: None, retry_seconds=0.0)
    app = FakeService(tmp_path).app(startup=startup)
    with TestClient(app, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {KEY}"}) as client:
        assert client.get("/healthz").status_code == 200
        for path in ("/readyz", "/jobs", "/openapi.json"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (503, "migrating")
            assert answer.headers["retry-after"] == "5"
            assert answer.headers["content-type"] == "application/problem+json"
        startup.run(threading.Event())
        assert [client.get(path).status_code for path in ("/readyz", "/jobs")] == [200, 200]
        app.state.shutdown.set()
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "leaving")


def test_call_shortly_before_the_database_opens_waits_for_it(tmp_path: Path) -> None:
    startup = DatabaseStartup(lambda: None, retry_seconds=0.0)
    with TestClient(FakeService(tmp_path).app(startup=startup), base_url="http://127.0.0.1") as client:
        timer = threading.Timer(0.2, startup.run, (threading.Event(),))
        timer.start()
        assert client.get("/jobs", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        timer.join()


def test_hanging_database_blocks_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.05)
    store = HangingStore()
    with FakeService(tmp_path, store=store).client() as client:
        codes = {client.get("/readyz").json()["code"] for _ in range(5)}
        assert codes == {"database_unreachable"}
        assert [thread.name for thread in threading.enumerate()].count("pulse") == 1
        store.released.set()
        wait_for(lambda: client.get("/readyz").status_code == 200)


def test_service_is_not_ready_until_preflight_has_started(tmp_path: Path) -> None:
    service = FakeService(tmp_path)
    with service.client() as client:
        service.preflight.starting = "is importing its libraries"
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "preflight_starting")
        assert answer.headers["retry-after"] == "5"
        service.preflight.starting = None
        assert client.get("/readyz").status_code == 200


@pytest.mark.slow
def test_locked_database_is_retried(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with closing(sqlite3.connect(tmp_path / "home" / "trainshed.db", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        # SQLite waits three seconds for a lock.
        url = f"sqlite:///{tmp_path / 'home' / 'trainshed.db'}?timeout=3"
        with served(tmp_path / "home", TRAINSHED_DATABASE_URL=url) as service:
            assert service.trouble() == "migrating"
            assert service.client.get("/healthz").status_code == 200
            wait_for(lambda: service.trouble() == "database_unreachable", "the code database_unreachable")
            assert "database is locked" in service.client.get("/readyz").json()["detail"]
            connection.rollback()
            service.ready()
        assert "database_does_not_answer" in service.log.read_text()


def test_newer_schema_revision_ends_the_process_with_one_line(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "trainshed.db")) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
        connection.commit()
    code, errors = ended(environment_of(tmp_path))
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith("the database is at schema revision 9999, and this version of Trainshed knows")
    assert not (tmp_path / "service.json").exists()
