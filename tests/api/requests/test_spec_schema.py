"""The JSON schema of the job spec, from the service and from the command."""

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.clients.command import run
from tests.support.fakes.service import FakeService
from train_loop.spec import job_schema

PATH = "/schemas/job.json"


def test_schema_needs_no_key_and_may_be_cached(client: TestClient) -> None:
    answer = client.get(PATH, headers={"authorization": ""})
    assert (answer.status_code, answer.json()) == (200, job_schema())
    assert answer.headers["content-type"] == "application/schema+json"
    assert answer.headers["cache-control"] == "public, max-age=3600"
    assert "x-request-id" in answer.headers


def test_schema_has_the_guards_of_other_open_calls(client: TestClient) -> None:
    unknown = client.get(f"{PATH}?version=1")
    assert (unknown.status_code, unknown.json()["errors"][0]["pointer"]) == (422, "/query/version")
    assert client.get(PATH, headers={"host": "evil.example"}).status_code == 400
    for method in ("HEAD", "POST"):
        refused, health = client.request(method, PATH), client.request(method, "/healthz")
        assert (refused.status_code, refused.headers["allow"]) == (health.status_code, health.headers["allow"])
        assert refused.status_code == 405


def test_schema_is_in_the_api_description(service: FakeService) -> None:
    described = service.app().openapi()["paths"][PATH]["get"]
    answer = described["responses"]["200"]
    assert described["tags"] == ["schemas"]
    assert "security" not in described
    assert (answer["content"].keys(), "Cache-Control" in answer["headers"]) == ({"application/schema+json"}, True)


def test_command_prints_the_schema_without_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path / "nowhere"))
    printed = run("schema")
    assert (printed.exit_code, json.loads(printed.stdout)) == (0, job_schema())
    file = tmp_path / "job.schema.json"
    written = run("schema", "--output", str(file))
    assert (written.exit_code, written.stdout) == (0, f"{file}\n")
    assert json.loads(file.read_text()) == job_schema()
    assert file.read_text() == printed.stdout
