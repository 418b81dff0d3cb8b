"""Fixtures: a service on fakes, a client with its key, and a home for the CLI."""

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import uvicorn
from fastapi.testclient import TestClient

from tests.support.fakes.service import KEY, FakeService, spec_body


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Log only warnings, so that request lines do not mix with the output of a command."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


@pytest.fixture
def client(service: FakeService) -> Iterator[TestClient]:
    with service.client() as client:
        yield client


@pytest.fixture
def url(service: FakeService) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(service.app(), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def home(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the home of a running service and set a terminal width of 200 columns."""
    for name in ("TRAINSHED_URL", "TRAINSHED_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "service.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))
    (tmp_path / "admin.key").write_text(KEY + "\n")
    (tmp_path / "spec.json").write_text(spec_body())
    return tmp_path
