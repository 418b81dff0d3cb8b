"""The pages that describe the API: they need no network and are built once."""

import json
import re
from unittest.mock import patch
from urllib.parse import urljoin

import pytest
from fastapi.testclient import TestClient

from service.api.openapi import OpenApiApp
from tests.support.fakes.service import FakeService


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    return TestClient(FakeService(tmp_path_factory.mktemp("docs")).app(), base_url="http://127.0.0.1")


def test_root_leads_to_the_docs(client: TestClient) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.url.path) == (200, "/docs")


def test_docs_load_everything_from_the_service(client: TestClient) -> None:
    page = client.get("/docs").text
    found = re.findall(r"""(?:href|src|url)(?:=|: )["']([^"']+)["']""", page)
    assert len(found) == 4
    for address in found:
        assert not re.match(r"https?:|//|/", address), "also below a prefix"
        answer = client.get(urljoin("/docs", address))
        assert (answer.status_code, len(answer.content) > 1000) == (200, True)
    style = client.get("/docs/swagger-ui.css").text
    assert not re.findall(r"url\((?!['\"]?data:)[^)]*\)|@import", style)
    assert client.get("/docs/other.js").status_code == 404
    assert client.head("/docs").headers["content-length"] == str(len(page))


def test_description_is_built_once(client: TestClient) -> None:
    first = client.get("/openapi.json")
    assert json.loads(first.content)["info"]["title"] == "Trainshed"
    with patch.object(OpenApiApp, "openapi", side_effect=AssertionError("built again")):
        assert client.get("/openapi.json").content == first.content
