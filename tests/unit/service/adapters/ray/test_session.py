"""Sessions with Ray's dashboard: the token reaches the dashboard's process only."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
import requests

from service.adapters.ray.session import RayAddress, request_version

TOKEN = "the-token"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"


class Listener:
    """A listener of this process that records what it receives."""

    def __init__(self, address: str, *, dual_stack: bool = False) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, dualstack_ipv6=dual_stack)
        self.port: int = self._server.getsockname()[1]
        self.received: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                self.received.append(connection.recv(1 << 16))
                if self.received[-1]:
                    connection.sendall(ANSWER)

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture(params=[("127.0.0.1", False), ("::", True)], ids=["ipv4", "both families"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    address, dual_stack = request.param
    one = Listener(address, dual_stack=dual_stack)
    yield one
    one.close()


@pytest.fixture
def other() -> Iterator[psutil.Process]:
    """Yield a process that listens nowhere."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield psutil.Process(child.pid)


def test_token_is_sent_to_expected_process(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy would receive the token.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    address = RayAddress(f"http://127.0.0.1:{listener.port}", TOKEN, psutil.Process)
    assert request_version(address, 5).text == "ok"
    assert f"Authorization: Bearer {TOKEN}".encode() in listener.received[0]


def test_token_is_not_sent_to_another_process(listener: Listener, other: psutil.Process) -> None:
    address = RayAddress(f"http://127.0.0.1:{listener.port}", TOKEN, lambda: other)
    with pytest.raises(requests.ConnectTimeout, match=f"process {other.pid} of Ray does not accept connections"):
        request_version(address, 0.2)
    assert b"".join(listener.received) == b""


def test_token_is_not_sent_after_dashboard_has_ended(listener: Listener, other: psutil.Process) -> None:
    other.kill()
    other.wait()
    for server in (lambda: other, lambda: None):
        with pytest.raises(requests.ConnectionError, match="Ray's dashboard has ended"):
            request_version(RayAddress(f"http://127.0.0.1:{listener.port}", TOKEN, server), 5)
    assert b"".join(listener.received) == b""
