"""The maximum priority of a project: only admins of all projects exceed it."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.config.environment import BadSettings, read_settings
from service.domain.access.roles import Role
from service.domain.queue.policy import PriorityLimits
from tests.support.fakes.service import KEY, FakeService, spec_body

LIMITS = PriorityLimits({"nlp": 10, "vision": -5})
ROLES: dict[str, dict[str, Role]] = {
    "editor": {"nlp": Role.EDITOR, "vision": Role.EDITOR, "audio": Role.EDITOR},
    "admin": {"nlp": Role.ADMIN, "vision": Role.ADMIN, "audio": Role.ADMIN},
    "editor of all": {"*": Role.EDITOR},
}
RULE = "ask the operator to raise TRAINSHED_MAX_PRIORITY; only an admin of all projects may exceed it"


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return FakeService(tmp_path, priorities=LIMITS).client()


def _key(client: TestClient, name: str) -> dict[str, str]:
    secret = client.post("/keys", json={"name": "alice", "roles": ROLES[name]}).json()["secret"]
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("who", ROLES)
@pytest.mark.parametrize(("project", "most"), [("nlp", 10), ("vision", -5), ("audio", 0)])
def test_spec_above_the_maximum_of_its_project_is_rejected(
    client: TestClient, project: str, most: int, who: str
) -> None:
    headers = _key(client, who)
    for path in ("/jobs", "/jobs/plan"):
        accepted = client.post(path, content=spec_body(project=project, priority=most), headers=headers)
        assert accepted.status_code in (200, 201)
        refused = client.post(path, content=_yaml(project, most + 1), headers=headers)
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["pointer"], error["line"]) == (422, "/priority", 2)
        assert error["message"] == (
            f"priority {most + 1} is over the maximum of project {project}, {most}; choose at most {most}, or {RULE}"
        )


def _yaml(project: str, priority: int) -> str:
    fields = json.loads(spec_body())
    return f"project: {project}\npriority: {priority}\n" + "".join(
        f"{name}: {json.dumps(value)}\n" for name, value in fields.items() if name not in ("project", "priority")
    )


def test_admin_of_all_projects_may_exceed_the_maximum(client: TestClient) -> None:
    other = client.post("/keys", json={"name": "root", "roles": {"*": "admin"}}).json()["secret"]
    for secret in (KEY, other):
        headers = {"authorization": f"Bearer {secret}"}
        sent = client.post("/jobs", content=spec_body(project="nlp", priority=1000), headers=headers)
        assert sent.status_code == 201


def test_clone_keeps_to_the_maximum(client: TestClient) -> None:
    origin = client.post("/jobs", content=spec_body(project="nlp", priority=50)).json()["id"]
    headers = _key(client, "editor")
    codes = [
        client.post(f"/jobs/{origin}/clone", json={"overrides": overrides, "from_checkpoint": 0}, headers=headers)
        for overrides in ({}, {"priority": 11}, {"priority": 10}, {"priority": 10, "project": "vision"})
    ]
    assert [answer.status_code for answer in codes] == [422, 422, 201, 422]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {"*": 0}),
        ("7", {"*": 7}),
        ('{"nlp": 10}', {"nlp": 10}),
        ("1001", "less than or equal to 1000"),
        ('{"NLP": 1}', "pattern"),
        ('{"nlp": "high"}', "valid integer"),
        ("high", "valid dictionary"),
    ],
)
def test_setting_is_a_number_or_a_number_for_each_project(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: Any
) -> None:
    if value is not None:
        monkeypatch.setenv("TRAINSHED_MAX_PRIORITY", value)
    if isinstance(expected, dict):
        assert read_settings().max_priority == expected
        return
    with pytest.raises(BadSettings, match=expected):
        read_settings()
