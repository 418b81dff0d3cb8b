"""A service on fakes, and a caller with its key."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service import FakeService


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


@pytest.fixture
def client(service: FakeService) -> Iterator[TestClient]:
    with service.client() as client:
        yield client
