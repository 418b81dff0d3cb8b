"""The addresses that the service listens on."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from service.config.address import local_service
from service.config.settings import Settings
from service.serve import _Server


def families(host: str, home: Path) -> set[int]:
    """Return the families of the sockets on which a service with this host listens."""

    async def listen() -> set[int]:
        app = FastAPI()
        app.state.shutdown, app.state.startup = SimpleNamespace(), SimpleNamespace(hopeless=None)
        server: Any = _Server(app, Settings(home=home, host=host, port=free_port()))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup()
        found = {one.family for part in server.servers for one in part.sockets}
        await server.shutdown()
        return found

    return asyncio.run(listen())


def free_port() -> int:
    """Return a port that is free in both families."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as free:
        return int(free.getsockname()[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "expected"),
    [("::", {socket.AF_INET, socket.AF_INET6}), ("0.0.0.0", {socket.AF_INET}), ("::1", {socket.AF_INET6})],
)
def test_host_of_all_addresses_includes_both_families(host: str, expected: set[int], tmp_path: Path) -> None:
    assert families(host, tmp_path) == expected


def test_url_of_a_service_that_does_not_run_is_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    monkeypatch.setenv("TRAINSHED_HOST", "::1")
    assert local_service().url == "http://[::1]:8000"
