"""The S3 server of tests answers, refuses and is gone for a while, and says what it was asked."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from tests.support.s3 import S3Server, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        server.bucket("data")
        yield server


@pytest.fixture
def files(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file system that knows of the server from its environment alone, and tries everything once."""
    for name, value in (server.environment() | {"AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    found = fsspec.filesystem("s3", skip_instance_cache=True)
    found.connect()
    return found


def test_what_was_put_is_read_by_ranges(server: S3Server, files: Any) -> None:
    server.put("data/folder/x.bin", b"first")
    server.put("data/folder/x.bin", b"0123456789")
    assert files.find("data") == ["data/folder/x.bin"]
    assert files.cat_file("data/folder/x.bin", start=2, end=5) == b"234"
    asked = server.requests()[-1]
    assert asked == {"method": "GET", "path": "/data/folder/x.bin", "range": "bytes=2-4", "status": 206}


def test_it_refuses_for_a_while_and_counts_what_it_refused(server: S3Server, files: Any) -> None:
    server.put("data/refused", b"x")
    before = server.refused
    with server.refuse(), pytest.raises(OSError, match="Service Unavailable"):
        files.info("data/refused")
    assert server.refused == before + 1
    assert files.cat_file("data/refused") == b"x"
    assert server.refused == before + 1


def test_it_says_slow_down_where_an_answer_has_a_body(
    server: S3Server, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(files), "retries", 2)
    before = server.refused
    with server.refuse(), pytest.raises(OSError, match="reduce your request rate"):
        files.cat_file("data/anything", start=0, end=1)
    assert server.refused == before + 2, "s3fs asks again only where it reads that code"


def test_it_comes_back_on_the_same_port_with_what_was_put(server: S3Server, files: Any) -> None:
    server.put("data/kept", b"x")
    with server.gone(), pytest.raises(Exception, match=f'Could not connect to the endpoint URL: "{server.endpoint}/'):
        files.info("data/kept")
    assert files.cat_file("data/kept") == b"x"
