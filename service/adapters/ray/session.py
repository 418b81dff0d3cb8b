"""HTTP sessions with Ray's dashboard that send nothing to a process of another program."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from service.adapters.ray.breaker import SHORT
from train_loop.system.peer import wait_for_peer

VERSION = "/api/version"
Server = Callable[[], psutil.Process | None]
"""Returns the process that must answer; None if it has ended."""


@dataclass(frozen=True)
class RayAddress:
    """The URL of a cluster's dashboard, and its token. If the token is None, Ray reads it from the environment.

    With `server`, requests go to that process only.
    """

    url: str
    token: str | None
    server: Server | None = None

    @property
    def headers(self) -> dict[str, str] | None:
        """Return the headers with the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else None


def request_version(address: RayAddress, seconds: float) -> requests.Response:
    """Request the dashboard's version. Any response is an answer, even a rejection."""
    with open_session(address.server) as session:
        return session.get(f"{address.url}{VERSION}", headers=address.headers, timeout=(min(seconds, SHORT), seconds))


def open_session(server: Server | None) -> requests.Session:
    """Return a session. With `server`, only that process receives its requests; else any process does.

    Proxies and ~/.netrc of the environment apply to other servers only: a proxy would receive the token.
    """
    session = requests.Session()
    if server is not None:
        session.trust_env = False
        session.mount("http://", _Adapter(server))
    return session


class _Adapter(HTTPAdapter):
    """An adapter whose connections check their peer before they send anything."""

    def __init__(self, server: Server) -> None:
        self._server = server
        super().__init__()

    def send(self, request: requests.PreparedRequest, **arguments: Any) -> requests.Response:  # type: ignore[override]
        """Send a request. Called by requests, with keywords only."""
        # A busy process may accept a connection late: the timeout of the answer applies to that, too.
        _, seconds = arguments.pop("timeout")
        return super().send(request, timeout=seconds, **arguments)

    def init_poolmanager(self, *args: Any, **named: Any) -> None:
        """Create the pools. Called by requests."""
        super().init_poolmanager(*args, **named)
        check = self._check

        class Connection(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                check(self)

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        self.poolmanager.pool_classes_by_scheme = {"http": Pool}

    def _check(self, connection: HTTPConnection) -> None:
        server = self._server()
        assert isinstance(connection.sock, socket.socket)
        if server is not None and wait_for_peer(connection.sock, server, seconds=_seconds(connection)):
            return
        connection.close()
        if server is None or not server.is_running():
            raise NewConnectionError(connection, "Ray's dashboard has ended")
        raise ConnectTimeoutError(
            connection,
            f"process {server.pid} of Ray does not accept connections at {connection.host}:{connection.port}",
        )


def _seconds(connection: HTTPConnection) -> float:
    return float(connection.timeout) if isinstance(connection.timeout, int | float) else SHORT
