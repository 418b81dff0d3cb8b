"""The S3 server of the tests: objects, refusals, outages and request records."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from tests.support.servers.s3 import S3Server, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        server.bucket("data")
        yield server


@pytest.fixture
def files(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a file system configured only by environment variables, without retries."""
    for name, value in (server.environment() | {"AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    found = fsspec.filesystem("s3", skip_instance_cache=True)
    found.connect()
    return found


def test_stored_object_is_read_by_ranges(server: S3Server, files: Any) -> None:
    server.put("data/folder/x.bin", b"first")
    server.put("data/folder/x.bin", b"0123456789")
    assert files.find("data") == ["data/folder/x.bin"]
    assert files.cat_file("data/folder/x.bin", start=2, end=5) == b"234"
    request = server.requests()[-1]
    assert request == {"method": "GET", "path": "/data/folder/x.bin", "range": "bytes=2-4", "status": 206}


def test_refused_requests_are_counted(server: S3Server, files: Any) -> None:
    server.put("data/refused", b"x")
    before = server.refused
    with server.refuse(), pytest.raises(OSError, match="Service Unavailable"):
        files.info("data/refused")
    assert server.refused == before + 1
    assert files.cat_file("data/refused") == b"x"
    assert server.refused == before + 1


def test_refusal_with_a_body_is_slow_down(server: S3Server, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(files), "retries", 2)
    before = server.refused
    with server.refuse(), pytest.raises(OSError, match="reduce your request rate"):
        files.cat_file("data/anything", start=0, end=1)
    assert server.refused == before + 2, "expected the code for which s3fs retries"


def test_server_returns_on_the_same_port_with_its_objects(server: S3Server, files: Any) -> None:
    server.put("data/kept", b"x")
    with server.gone(), pytest.raises(Exception, match=f'Could not connect to the endpoint URL: "{server.endpoint}/'):
        files.info("data/kept")
    assert files.cat_file("data/kept") == b"x"
