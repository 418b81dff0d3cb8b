"""Shutdown of real processes while something hangs: in-flight answers finish, leases are released, within 10 s."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.domain.jobs.transitions import start
from service.lifecycle.shutdown import FORCED
from service.ports import NewJob
from tests.support.fakes.service import a_job
from tests.support.servers.postgres import postgres_server
from tests.support.servers.served import Served, served
from tests.support.servers.silent_servers import mute_server
from tests.support.waiting import wait_for

LIMIT = 20.0
"""Seconds; a timer of nine ends the process within ten, and ten more are for a machine that is busy."""


class SlowRequest:
    """A POST request of which only a part is sent until `finish` sends the rest."""

    def __init__(self, served: Served, path: str, body: bytes) -> None:
        url = served.client.base_url
        self._body = body
        self._socket = socket.create_connection((url.host, url.port), timeout=60)
        key = served.client.headers["authorization"]
        head = f"POST {path} HTTP/1.1\r\nhost: {url.host}\r\nauthorization: {key}\r\ncontent-length: {len(body)}\r\n"
        self._socket.sendall(f"{head}expect: 100-continue\r\n\r\n".encode())
        # uvicorn sends this once the handler reads the body.
        assert self._socket.recv(1000).startswith(b"HTTP/1.1 100 ")
        self._socket.sendall(body[:5])

    def finish(self) -> bytes:
        """Send the rest and return the whole answer."""
        self._socket.sendall(self._body[5:])
        parts = list[bytes]()
        while part := self._socket.recv(1 << 16):
            parts.append(part)
        self._socket.close()
        return b"".join(parts)


def is_listening(served: Served) -> bool:
    try:
        socket.create_connection((served.client.base_url.host, served.client.base_url.port or 0)).close()
    except ConnectionRefusedError:
        return False
    return True


def exit_code(served: Served, *, since: float) -> int:
    code = served.process.wait(timeout=60)
    assert time.monotonic() - since < LIMIT
    return code


def test_in_flight_answer_finishes_although_the_cluster_never_answers(tmp_path: Path) -> None:
    with mute_server() as mute, served(tmp_path / "home", TRAINSHED_RAY_ADDRESS=mute) as service:
        service.ready()
        job = service.client.post("/jobs", content=json.dumps({}))
        assert job.status_code == 422
        slow = SlowRequest(service, "/keys", json.dumps({"name": "late", "roles": {"*": "viewer"}}).encode())
        service.process.send_signal(signal.SIGTERM)
        since = time.monotonic()
        wait_for(lambda: not is_listening(service), "the end of listening")
        assert slow.finish().startswith(b"HTTP/1.1 201 ")
        assert exit_code(service, since=since) == 0


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


def owners(connection: "psycopg.Connection[tuple[str]]") -> set[str]:
    """Return the owners of the queue's lease and of the jobs' leases."""
    rows = connection.execute(
        "SELECT owner FROM leases UNION SELECT lease_owner FROM jobs WHERE lease_owner IS NOT NULL"
    ).fetchall()
    connection.rollback()
    return {row[0].rpartition("/")[2] for row in rows}


def lists_jobs_blocked(connection: "psycopg.Connection[tuple[str]]") -> bool:
    """Return True if a query that lists jobs waits for a lock."""
    query = "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%ORDER BY jobs.id DESC%'"
    return connection.execute(query).fetchone() is not None


@pytest.mark.slow
def test_replicas_take_over_at_once_and_end_although_the_database_hangs(postgres: str, tmp_path: Path) -> None:
    engine = open_database(postgres)
    SqlJobStore(engine).add(NewJob(start(a_job("job-1", run_dir=(tmp_path / "run").as_uri()), now=time.time())))
    engine.dispose()
    settings: dict[str, Any] = {"TRAINSHED_DATABASE_URL": postgres, "TRAINSHED_LEASE_SECONDS": "3600"}
    plain = postgres.replace("+psycopg", "")
    with ExitStack() as stack:
        first = stack.enter_context(served(tmp_path / "first", **settings))
        connection = stack.enter_context(psycopg.connect(plain))
        wait_for(lambda: owners(connection) == {"first"}, "leases of the first")
        second = stack.enter_context(served(tmp_path / "second", **settings))
        third = stack.enter_context(served(tmp_path / "third", **settings))
        for service in (first, second, third):
            service.ready()
        assert owners(connection) == {"first"}
        since = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert exit_code(first, since=since) == 0
        # Leases that are not released expire after an hour.
        wait_for(lambda: owners(connection) and "first" not in owners(connection), "leases of another replica")

        connection.execute("LOCK TABLE jobs, leases, keys IN ACCESS EXCLUSIVE MODE")
        pid = psutil.Process(second.process.pid)
        assert second.trouble() == "database_unreachable"
        threads = pid.num_threads()
        assert {second.trouble() for _ in range(3)} == {"database_unreachable"}
        assert pid.num_threads() <= threads + 1
        assert second.client.get("/healthz").status_code == 200

        hung = threading.Thread(target=_list_jobs, args=(second,), daemon=True)
        hung.start()
        observer = stack.enter_context(psycopg.connect(plain, autocommit=True))
        wait_for(lambda: lists_jobs_blocked(observer), "a request that waits for the database")
        since = time.monotonic()
        for service in (second, third):
            service.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not is_listening(third), "the end of listening")
        # A second SIGTERM ends the process at once.
        third.process.send_signal(signal.SIGTERM)
        assert exit_code(third, since=since) == 128 + signal.SIGTERM
        assert exit_code(second, since=since) == FORCED
        connection.rollback()
    assert "second stop signal" in third.log.read_text()
    assert "the service did not stop within 9 s" in second.log.read_text()


def _list_jobs(service: Served) -> None:
    try:
        httpx.get(f"{service.client.base_url}/jobs", headers=service.client.headers, timeout=60)
    except httpx.HTTPError:
        return
