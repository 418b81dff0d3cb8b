"""A service on fakes, and a caller with its key."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from fastapi.testclient import TestClient

from tests.support.service import FakeService


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """No line for each request: whoever tests a command reads what that says."""
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
