"""Incomplete, unread and excess connections to a real service with few open files."""

import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.lifecycle.connection_limits import (
    Limits,
    connections_within,
    max_connections,
    parse_proxies,
    raise_open_files,
)
from tests.support.servers.served import Served, served
from tests.support.waiting import wait_for

HALF = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FILES = 1024


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a service that may open 1,024 files, the limit of a login shell on most systems."""
    home = tmp_path_factory.mktemp("served")
    settings: dict[str, Any] = {"TRAINSHED_HEAD_SECONDS": "2", "TRAINSHED_BODY_BYTES_PER_SECOND": "1000"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * FILES), hard))
    try:
        with served(home, files=FILES, **settings) as running:
            running.ready()
            yield running
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(service: Served) -> socket.socket:
    """Open a connection."""
    url = service.client.base_url
    return socket.create_connection((url.host, url.port), timeout=10)


def seconds_until_closed(connection: socket.socket, *, limit: float) -> float:
    """Return the seconds until the service closes a connection."""
    begun = time.monotonic()
    connection.settimeout(limit)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - begun


def test_excess_half_open_connections_do_not_block_requests(service: Served) -> None:
    with ExitStack() as stack:
        for _ in range(FILES + 300):
            half = stack.enter_context(closing(connect(service)))
            half.sendall(HALF)
        for _ in range(5):
            assert service.client.get("/healthz", headers={"connection": "close"}).status_code == 200
    log = service.log.read_text()
    assert log.count("\n") < 200
    assert "Traceback" not in log


def test_incomplete_head_is_closed_after_its_timeout(service: Served) -> None:
    with closing(connect(service)) as half:
        half.sendall(HALF)
        assert 1 < seconds_until_closed(half, limit=20) < 10


def test_slow_head_is_closed_after_its_timeout(service: Served) -> None:
    with closing(connect(service)) as slow:
        begun = time.monotonic()

        def is_closed() -> bool:
            try:
                slow.sendall(b"x")
                slow.settimeout(0.2)
                return not slow.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True

        slow.sendall(HALF)
        wait_for(is_closed, "the end of the connection", seconds=20)
        assert time.monotonic() - begun < 15


def test_request_with_two_lengths_is_refused_and_ends_the_connection(service: Served) -> None:
    inside = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(service) as connection:
        head = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % (5 + len(inside)) + b"0\r\n\r\n" + inside)
        connection.settimeout(10)
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answers.startswith(b"HTTP/1.1 422 ")
    assert answers.count(b"HTTP/1.1 ") == 1


def test_idle_connection_is_kept_for_the_next_request(service: Served) -> None:
    url = service.client.base_url
    with closing(HTTPConnection(url.host, url.port or 80)) as kept:
        for _ in range(2):
            kept.request("GET", "/healthz")
            used = kept.sock
            assert kept.getresponse().read() == b'{"status":"ok"}'
            # Wait longer than the timeout for a head, which starts with its first byte.
            time.sleep(2.5)
            assert kept.sock is used


def pipeline(service: Served, address: str, path: str) -> socket.socket:
    """Open a connection from an address that sends many requests and never reads."""
    url = service.client.base_url
    connection = socket.create_connection((url.host, url.port), timeout=10, source_address=(address, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    with suppress(OSError):
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * 300)
    return connection


def resident_mib(service: Served) -> float:
    """Return the resident memory of the service in MiB."""
    text = Path(f"/proc/{service.process.pid}/smaps_rollup").read_text()
    return int(text.partition("Rss:")[2].split()[0]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses")
def test_strangers_who_never_read_neither_shut_others_out_nor_fill_memory(service: Served) -> None:
    each = 430 if os.environ.get("MORE") else 80
    before = resident_mib(service)
    with ExitStack() as stack:
        url = service.client.base_url
        known = stack.enter_context(httpx.Client(base_url=url, headers=service.client.headers, timeout=60))
        assert known.get("/me").status_code == 200
        for number in range(5 * each):
            path = ("/openapi.json", "/docs", "/schemas/job.json", "/me", "/nowhere")[number % 5]
            stack.enter_context(closing(pipeline(service, f"127.0.0.{2 + number // each}", path)))
        for _ in range(5):
            assert httpx.get(f"{url}/me", headers=service.client.headers, timeout=60).status_code == 200
        assert known.get("/me").status_code == 200, "a connection with a key is kept"
        # Measured: 84 KiB a connection that reads nothing of /openapi.json.
        assert resident_mib(service) - before < 10 + 0.1 * 5 * each
    assert "Traceback" not in service.log.read_text()


HEAD = b"POST /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
INVALID = {
    "chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
    "request behind a request": HEAD + b"Content-Length: 2\r\n\r\n{}\0\0\r\n\r\n",
    "head": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
    "upgrade": b"GET /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


def test_invalid_and_refused_requests_do_not_fill_the_log(service: Served) -> None:
    before = len(service.log.read_text())
    # More than the limit of calls without a key.
    for _ in range(3):
        with closing(pipeline(service, "127.0.0.1", "/me")) as connection:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                continue
    for content in INVALID.values():
        for _ in range(20):
            with closing(connect(service)) as connection, suppress(ConnectionError):
                connection.sendall(content)
                connection.recv(9)
    log = service.log.read_text()[before:]
    assert "Traceback" not in log
    refused = [line for line in log.splitlines() if "status=429" in line]
    assert len([line for line in log.splitlines() if "uvicorn.error" in line]) < 10
    assert len(refused) < 20


@pytest.mark.slow
def test_incomplete_body_and_unread_answer_are_closed_after_their_timeout(service: Served) -> None:
    key = service.client.headers["authorization"]
    head = f"POST /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {key}\r\nContent-Length: 100\r\n\r\n"
    with closing(pipeline(service, "127.0.0.9", "/openapi.json")) as unread, closing(connect(service)) as half:
        half.sendall(head.encode() + b"{")
        assert seconds_until_closed(half, limit=40) < 20
        wait_for(lambda: unread.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "the end of the connection", seconds=20)


def test_excess_connections_of_an_address_replace_its_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"TRAINSHED_CONNECTIONS_PER_ADDRESS": "20"}
    with served(tmp_path, **settings) as service, ExitStack() as stack:
        service.ready()
        connections = [stack.enter_context(closing(connect(service))) for _ in range(60)]
        for one in connections:
            one.setblocking(False)

        def ended() -> int:
            found = 0
            for one in connections:
                try:
                    found += one.recv(1) == b""
                except BlockingIOError:
                    continue
                except OSError:
                    found += 1
            return found

        assert wait_for(lambda: ended() >= 40 and ended(), "the end of the excess connections") <= 45
        assert service.client.get("/me").status_code == 200
        lines = [line for line in service.log.read_text().splitlines() if "connections_limited" in line]
        assert 1 <= len(lines) <= 5
        assert "address" in lines[0]


def test_forwarded_address_of_an_unknown_proxy_is_ignored(tmp_path: Path) -> None:
    with served(tmp_path, TRAINSHED_STRANGERS_PER_ADDRESS="3/minute") as service:
        service.ready()
        codes = [
            httpx.get(f"{service.client.base_url}/me", headers={"X-Forwarded-For": f"10.0.0.{number}"}).status_code
            for number in range(5)
        ]
    assert codes == [401, 401, 401, 429, 429]


@pytest.mark.parametrize(
    ("allowed", "trusted"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("10.0.0.0/8, ::1", {"10.1.2.3", "::1"}),
        ("*", {"127.0.0.1", "10.1.2.3", "::1", "fe80::1%eth0"}),
        ("proxy.example", set()),
        ("", set()),
    ],
)
def test_trusted_proxies_are_those_of_uvicorn(allowed: str, trusted: set[str]) -> None:
    limits = Limits(1, 1, 1.0, 1.0, parse_proxies(allowed))
    addresses = {"127.0.0.1", "10.1.2.3", "::1", "fe80::1%eth0", "", "unix"}
    assert {address for address in addresses if limits.trusts(address)} == trusted


def test_connection_limit_leaves_files_for_other_uses() -> None:
    assert connections_within(1024) == 384
    assert connections_within(64) == 16


@pytest.mark.parametrize("rejected", [ValueError, OSError])
def test_rejected_increase_of_open_files_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, rejected: type[Exception]
) -> None:
    def reject(*_: object) -> None:
        raise rejected("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", reject)
    raise_open_files()
    assert max_connections() > 1 << 20
