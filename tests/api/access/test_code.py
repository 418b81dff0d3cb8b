"""Own code in specs: only in projects that the operator allows, and after the role is checked."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.config.environment import BadSettings, read_settings
from service.domain.access.code import CodePolicy
from service.domain.access.roles import Role
from tests.support.builders.specs import code_spec
from tests.support.fakes.service import FakeService, spec_body

RULE = "may not run its own code; ask the operator to add it to TRAINSHED_ALLOW_CODE, or remove code"


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return FakeService(tmp_path, code=CodePolicy(frozenset({"nlp"}))).client()


def body(project: str) -> str:
    return json.dumps(code_spec() | {"project": project})


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan"])
def test_code_needs_the_operators_permission_for_the_project(client: TestClient, path: str) -> None:
    assert client.post(path, content=body("nlp")).status_code in (200, 201)
    refused = client.post(path, content=body("vision"))
    (error,) = refused.json()["errors"]
    assert (refused.status_code, error["pointer"], error["message"]) == (422, "/code", f"project vision {RULE}")


def test_role_is_asked_first(client: TestClient) -> None:
    viewer = client.post("/keys", json={"name": "eve", "roles": {"nlp": Role.VIEWER, "audio": Role.EDITOR}}).json()
    headers = {"authorization": f"Bearer {viewer['secret']}"}
    assert client.post("/jobs", content=body("nlp"), headers=headers).status_code == 403
    assert client.post("/jobs", content=body("vision"), headers=headers).status_code == 403


def test_clone_cannot_bring_code_into_another_project(client: TestClient) -> None:
    job = client.post("/jobs", content=body("nlp")).json()["id"]
    moved = client.post(f"/jobs/{job}/clone", json={"overrides": {"project": "vision"}, "from_checkpoint": 0})
    assert (moved.status_code, moved.json()["errors"][0]["pointer"]) == (422, "/code")
    plain = client.post("/jobs", content=spec_body(project="vision")).json()["id"]
    added = {"code": code_spec()["code"], "model": {"config": None}}
    changed = client.post(f"/jobs/{plain}/clone", json={"overrides": added, "from_checkpoint": 0})
    assert changed.status_code == 422


def test_digest_of_the_checked_package_is_in_the_spec_and_the_audit_log(client: TestClient) -> None:
    job = client.post("/jobs", content=body("nlp")).json()
    assert job["spec"]["code"]["sha256"] == "c" * 64
    (entry,) = client.get("/audit").json()["data"]
    assert entry["after"]["code"] == "c" * 64
    clone = client.post(f"/jobs/{job['id']}/clone", json={}).json()
    assert clone["spec"]["code"]["sha256"] == "c" * 64


@pytest.mark.parametrize(
    ("text", "allowed"),
    [(None, []), ("nlp", ["nlp"]), (" nlp , vision ", ["nlp", "vision"]), ("*", ["nlp", "vision", "audio"])],
)
def test_setting_lists_projects_and_reaches_workers(
    monkeypatch: pytest.MonkeyPatch, text: str | None, allowed: list[str]
) -> None:
    if text is not None:
        monkeypatch.setenv("TRAINSHED_ALLOW_CODE", text)
    settings: Any = read_settings()
    projects = ("nlp", "vision", "audio")
    assert [one for one in projects if settings.code_policy.allows(one)] == allowed
    assert [one for one in projects if settings.read_policy(one).code] == allowed


@pytest.mark.parametrize("text", ["NLP", "a b", "nlp,-"])
def test_setting_with_another_name_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRAINSHED_ALLOW_CODE", text)
    with pytest.raises(BadSettings):
        read_settings()
