"""API answers while a real database is stopped, frozen or locked; no idempotency key stays in flight."""

import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path

import httpx
import psycopg
import pytest
from fastapi.testclient import TestClient
from httpx2 import Response
from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError

from service.adapters.sql.database import Database, open_database
from service.adapters.sql.faults import explain
from service.adapters.sql.store import SqlJobStore
from service.adapters.sql.tables import webhooks
from service.ports import Cancellation, PreflightReport
from service.use_cases.runs import streams
from tests.support.fakes.service import KEY as OPERATOR_KEY
from tests.support.fakes.service import FakeService, spec_body
from tests.support.fakes.stores import MemoryPreflight
from tests.support.servers.postgres import PostgresServer, own_postgres
from tests.support.servers.serving import serving
from train_loop.run_dir import Parent
from train_loop.spec import AnyJobSpec

KEY = {"Idempotency-Key": "k"}
SECONDS = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    if shutil.which("initdb") is None:
        pytest.skip("no Postgres binaries on this machine")
    with own_postgres() as server:
        yield server


class Postgres:
    """The service on a Postgres that can be stopped."""

    def __init__(self, server: PostgresServer) -> None:
        self.server, self.url = server, server.url

    def disconnect(self) -> None:
        self.server.stop()

    def reconnect(self) -> None:
        self.server.start()


class Sqlite:
    """The service on a SQLite file that another process can lock."""

    def __init__(self, file: Path) -> None:
        self.url = f"sqlite:///{file}"
        self._other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)

    def disconnect(self) -> None:
        self._other.execute("BEGIN EXCLUSIVE")

    def reconnect(self) -> None:
        self._other.execute("ROLLBACK")


class BreakingPreflight(MemoryPreflight):
    """A preflight that disconnects the database once, while it checks a spec."""

    database: Postgres | Sqlite | None = None

    def check(
        self, spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        if self.database is not None:
            self.database.disconnect()
            self.database = None
        return super().check(spec, parent)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Postgres | Sqlite:
    if request.param == "postgres":
        return Postgres(request.getfixturevalue("server"))
    return Sqlite(tmp_path / "shed.db")


@contextmanager
def _client(url: str, folder: Path, preflight: MemoryPreflight) -> Iterator[TestClient]:
    database = Database(url, seconds=SECONDS)
    database.bring_up_to_date()
    try:
        with FakeService(folder, store=SqlJobStore(database.engine), preflight=preflight).client() as client:
            yield client
    finally:
        database.close()


def _error(answer: Response) -> tuple[int, str, bool]:
    return answer.status_code, answer.json()["code"], "retry-after" in answer.headers


UNREACHABLE = (503, "database_unreachable", True)


def test_idempotency_key_is_free_after_database_disconnects_during_post(
    database: Postgres | Sqlite, tmp_path: Path
) -> None:
    preflight = BreakingPreflight()
    preflight.database = database
    with _client(database.url, tmp_path, preflight) as client:
        body = spec_body(labels={"n": "1"})
        refused = client.post("/jobs", content=body, headers=KEY)
        database.reconnect()
        assert _error(refused) == UNREACHABLE
        made, again = (client.post("/jobs", content=body, headers=KEY) for _ in range(2))
        assert (made.status_code, again.status_code) == (201, 200)
        assert made.json()["id"] == again.json()["id"]
        assert len(client.get("/jobs").json()["data"]) == 1


@pytest.mark.parametrize("committed", [False, True])
def test_disconnect_at_commit_stores_both_job_and_key_or_neither(
    server: PostgresServer, tmp_path: Path, committed: bool
) -> None:
    with _client(server.url, tmp_path, MemoryPreflight()) as client:
        store = client.app.state.jobs.store  # type: ignore[attr-defined]
        stopped = threading.Event()

        def stop(connection: Connection) -> None:
            if not stopped.is_set():
                stopped.set()
                if committed:
                    connection.connection.commit()
                    # Open a transaction so that the commit that follows fails.
                    connection.connection.cursor().execute("SELECT 1")
                server.stop()

        event.listen(store._engine, "commit", stop)
        body, key = spec_body(), {"Idempotency-Key": f"commit-{committed}"}
        refused = client.post("/jobs", content=body, headers=key)
        server.start()
        assert _error(refused) == UNREACHABLE
        again = client.post("/jobs", content=body, headers=key)
        assert again.status_code == (200 if committed else 201)


def test_calls_return_503_while_postgres_is_stopped_and_succeed_after_restart(
    server: PostgresServer, tmp_path: Path
) -> None:
    with _client(server.url, tmp_path, MemoryPreflight()) as client:
        assert client.get("/jobs").status_code == 200
        server.stop()
        try:
            for _ in range(3):
                assert _error(client.get("/jobs")) == UNREACHABLE
                assert _error(client.post("/jobs", content=spec_body(), headers=KEY)) == UNREACHABLE
                assert _error(client.get("/readyz")) == UNREACHABLE
        finally:
            server.start()
        assert client.get("/jobs").status_code == 200
        assert client.get("/readyz").status_code == 200


def test_calls_return_503_within_timeouts_while_postgres_is_frozen(server: PostgresServer, tmp_path: Path) -> None:
    with _client(f"{server.url}?connect_timeout=2", tmp_path, MemoryPreflight()) as client:
        assert client.get("/jobs").status_code == 200
        with server.frozen():
            began = time.monotonic()
            assert _error(client.get("/jobs")) == UNREACHABLE
            # The statement timeout detects the dead pooled connection; then the connect timeout applies.
            assert time.monotonic() - began < SECONDS + 1 + 2 + 10, "expected no endless wait"
        assert client.get("/jobs").status_code == 200


def test_statement_waiting_for_postgres_lock_times_out_and_reads_succeed(
    server: PostgresServer, tmp_path: Path
) -> None:
    with _client(server.url, tmp_path, MemoryPreflight()) as client:
        engine = client.app.state.jobs.store._engine  # type: ignore[attr-defined]
        with engine.connect() as other:
            other.exec_driver_sql("LOCK TABLE jobs IN SHARE MODE")
            assert _error(client.post("/jobs", content=spec_body())) == UNREACHABLE
            assert client.get("/jobs").status_code == 200
        assert client.post("/jobs", content=spec_body()).status_code == 201


def _locked(file: Path) -> AbstractContextManager[sqlite3.Connection]:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return closing(connection)


def test_locked_sqlite_serves_reads_and_is_not_ready(tmp_path: Path) -> None:
    file = tmp_path / "shed.db"
    with _client(f"sqlite:///{file}?timeout=0.2", tmp_path, MemoryPreflight()) as client:
        assert client.post("/jobs", content=spec_body()).status_code == 201
        with _locked(file):
            refused = client.post("/jobs", content=spec_body())
            assert _error(refused) == UNREACHABLE
            assert "another process holds its lock" in refused.json()["detail"]
            assert len(client.get("/jobs").json()["data"]) == 1
            assert _error(client.get("/readyz")) == UNREACHABLE
        assert client.get("/readyz").status_code == 200
        assert client.post("/jobs", content=spec_body()).status_code == 201


def test_stream_ends_cleanly_when_database_stops_and_resumes_by_last_event_id(
    server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_END_SECONDS", 0.1)
    database = Database(server.url, seconds=SECONDS)
    database.bring_up_to_date()
    service = FakeService(tmp_path, store=SqlJobStore(database.engine))
    job_id = service.submit().id
    service.reconciler().run_once()
    service.metric(job_id, step=1, loss=1.0)
    stream = {"accept": "text/event-stream", "authorization": f"Bearer {OPERATOR_KEY}"}
    with serving(service.app()) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        with client.stream("GET", f"/jobs/{job_id}/metrics", headers=stream) as answer:
            lines = answer.iter_lines()
            ids = [line for line in islice(lines, 6) if line.startswith("id: ")]
            server.stop()
            # A dropped connection raises RemoteProtocolError here.
            rest = list(lines)
        assert "event: end" not in rest
        server.start()
        service.metric(job_id, step=2, loss=1.0)
        last = {"last-event-id": ids[-1].removeprefix("id: ")}
        with client.stream("GET", f"/jobs/{job_id}/metrics", headers=stream | last) as answer:
            data = next(line for line in answer.iter_lines() if line.startswith("data: "))
    database.close()
    assert json.loads(data.removeprefix("data: "))["step"] == 2


def test_error_of_failing_write_contains_no_row_value(database: Postgres | Sqlite) -> None:
    engine = open_database(database.url)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE webhooks RENAME TO elsewhere")
    with pytest.raises(SQLAlchemyError) as failed, engine.begin() as connection:
        connection.execute(webhooks.insert().values(id="hook-1", secret="whsec_QUJD"))
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO webhooks")
    engine.dispose()
    assert "INSERT INTO webhooks" in str(failed.value)
    assert "whsec_" not in str(failed.value)


def sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (psycopg.errors.DiskFull("no room"), 507, "no disk space left"),
        (psycopg.errors.ReadOnlySqlTransaction("standby"), 503, "is read-only"),
        (psycopg.errors.QueryCanceled("too slow"), 503, "TRAINSHED_DATABASE_CALL_SECONDS"),
        (psycopg.errors.AdminShutdown("going"), 503, "is shutting down"),
        (psycopg.OperationalError("refused"), 503, "the connection failed"),
        (psycopg.errors.StatementTooComplex("a programming error"), None, ""),
        (psycopg.errors.InFailedSqlTransaction("a programming error"), None, ""),
        (sqlite_error(sqlite3.SQLITE_FULL), 507, "no disk space left"),
        (sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), 503, "another process holds its lock"),
        (sqlite_error(sqlite3.SQLITE_READONLY_DBMOVED), 503, "is read-only"),
        (sqlite_error(sqlite3.SQLITE_IOERR_FSYNC), 503, "cannot be read or written"),
        (sqlite_error(sqlite3.SQLITE_ERROR), None, ""),
    ],
)
def test_explain_driver_error_returns_outage_with_reason_or_none(
    error: Exception, status: int | None, reason: str, tmp_path: Path
) -> None:
    found = explain(error, tmp_path / "shed.db" if isinstance(error, sqlite3.Error) else None)
    assert (None if found is None else found.status) == status
    assert reason in str(found)
