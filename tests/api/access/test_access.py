"""Access control: every call with every role, in the caller's project and in another, and with invalid keys."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.api.build import put_state
from service.domain.access.oidc_claims import Claims, TokenRules
from service.domain.access.roles import ANY, Role
from service.domain.webhooks.delivery import Delivery, Message
from service.use_cases.access.access import Tokens
from tests.support.fakes.service import KEY, FakeService, spec_body
from tests.support.fakes.stores import MemoryJobStore, MemoryTokens

PUBLIC = {("get", "/healthz"), ("get", "/readyz"), ("get", "/schemas/job.json")}
VISIBLE_ONLY = {("get", path) for path in ("/jobs", "/nodes", "/usage", "/me")}
"""Calls that return only the resources that the caller may see."""
ADMIN_LISTS = {("get", path) for path in ("/keys", "/audit", "/webhooks")}
"""Calls that return only the resources of projects that the caller administers, and need one."""
REJECTED = ("none", "unknown", "revoked", "expired", "token-expired")
TOKENS = {f"token-{role}": f"token.{role}.sound" for role in Role}
CLAIMS: dict[str, Claims] = {TOKENS[f"token-{role}"]: {"sub": role, "exp": 1e12, "groups": [role]} for role in Role}
RULES = TokenRules("groups", {role: {"own": role} for role in Role})
ADMIN_ONLY = {("post", "/doctor")}
"""Calls that only an admin of all projects may make."""
Call = tuple[str, str]


@cache
def app() -> FastAPI:
    """Build the routes once: they are the same in every world and slow to build."""
    return FakeService(Path("/nowhere")).app()


def calls() -> list[Call]:
    """Return every call of the OpenAPI document, so that the tests also cover new calls."""
    paths = app().openapi()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


class World:
    """A service with a job, a key and a webhook in a project; the shared routes serve the newest World."""

    def __init__(self, root: Path, project: str) -> None:
        self.service = FakeService(root, tokens=Tokens(MemoryTokens(CLAIMS), RULES))
        self.project = project
        put_state(app(), self.service.parts())
        self.client = TestClient(app(), base_url="http://127.0.0.1", headers={"authorization": f"Bearer {KEY}"})
        self.job = self.client.post("/jobs", content=spec_body(project=project)).json()["id"]
        self.target, _ = self.key({project: "viewer"})
        body = {"project": project, "url": "https://hooks.example/x"}
        self.webhook = self.client.post("/webhooks", json=body).json()["webhook"]["id"]
        self.service.hooks.log.append(
            Delivery(1, self.webhook, Message("m", "job.state", self.job, "{}", 1.0), 1.0, 1.0)
        )

    def key(self, roles: dict[str, str], **fields: Any) -> tuple[str, str]:
        """Create a key; return its id and its secret."""
        answer = self.client.post("/keys", json={"name": "alice", "roles": roles} | fields)
        assert answer.status_code == 201, answer.text
        return answer.json()["key"]["id"], answer.json()["secret"]

    def stored(self) -> tuple[object, ...]:
        """Return all jobs, keys, webhooks and deliveries."""
        assert isinstance(self.service.store, MemoryJobStore)
        hooks = self.service.hooks
        return dict(self.service.store.jobs), dict(self.service.keys.keys), dict(hooks.webhooks), list(hooks.log)

    def secret(self, kind: str) -> str | None:
        """Return the secret or token of a kind of caller."""
        if kind in ("none", "unknown"):
            return None if kind == "none" else f"trainshed_0001_{'0' * 64}"
        if kind.startswith("token-"):
            return TOKENS.get(kind, "token.is.over")
        soon = "1970-01-01T00:16:50Z"
        key_id, secret = self.key(
            {"own": kind if kind in list(Role) else "admin"}, expires_at=soon if kind == "expired" else None
        )
        if kind == "revoked":
            assert self.client.delete(f"/keys/{key_id}").status_code == 204
        if kind == "expired":
            self.service.clock.now = 1010.0
        return secret

    def send(self, call: Call, secret: str | None) -> Any:
        """Send a call with `secret` and return the answer."""
        method, path = call
        path = path.format(job_id=self.job, step=10, key_id=self.target, webhook_id=self.webhook, number=1)
        bodies = {
            "/jobs": spec_body(project=self.project),
            "/jobs/plan": spec_body(project=self.project),
            "/webhooks": json.dumps({"project": self.project, "url": "https://hooks.example/y"}),
            "/keys": json.dumps({"name": "new", "roles": {self.project: "viewer"}}),
        }
        headers = {"authorization": f"Bearer {secret}" if secret else ""}
        return self.client.request(method, path, content=bodies.get(path, ""), headers=headers)


def code_of(answer: Any) -> tuple[int, str | None]:
    """Return the status and the code of the problem, if any."""
    return answer.status_code, answer.json().get("code") if answer.content and answer.status_code >= 400 else None


def expected(call: Call, kind: str, project: str, best: tuple[int, str | None]) -> tuple[int, str | None]:
    """Return the expected status and code for a kind of caller, given the operator's answer `best`."""
    method, path = call
    if call in PUBLIC:
        return best
    if kind in REJECTED:
        return 401, "unauthorized"
    if path == "/metrics":
        # The metrics cover all projects.
        return 403, "forbidden"
    if call in VISIBLE_ONLY:
        return 200, None
    if call in ADMIN_ONLY:
        return 403, "forbidden"
    if call in ADMIN_LISTS:
        return (200, None) if Role(kind.removeprefix("token-")) is Role.ADMIN else (403, "forbidden")
    admins = path.startswith(("/keys", "/webhooks"))
    needed = Role.ADMIN if admins else Role.VIEWER if method == "get" else Role.EDITOR
    if project == "own" and Role(kind.removeprefix("token-")).covers(needed):
        return best
    if path == "/keys/{key_id}":
        return 404, "key_not_found"
    if project == "other" and "{webhook_id}" in path:
        return 404, "webhook_not_found"
    return (404, "job_not_found") if project == "other" and "{job_id}" in path else (403, "forbidden")


@pytest.mark.parametrize("project", ["own", "other"])
@pytest.mark.parametrize("call", calls(), ids=" ".join)
def test_every_call_answers_by_role_of_the_caller(
    tmp_path_factory: pytest.TempPathFactory, call: Call, project: str
) -> None:
    best = code_of(World(tmp_path_factory.mktemp("best"), project).send(call, KEY))
    world: World | None = None
    for kind in (*Role, *TOKENS, *REJECTED):
        world = world or World(tmp_path_factory.mktemp("world"), project)
        secret = world.secret(kind)
        before, deeds = world.stored(), len(world.service.keys.done)
        answer = code_of(world.send(call, secret))
        assert answer == expected(call, kind, project, best), kind
        changed = world.stored() != before
        assert len(world.service.keys.done) == deeds + changed, "the audit log has each change and nothing else"
        assert not changed or (answer[0] < 300 and call[0] != "get"), kind
        if changed:
            # The next caller must find what this one has changed.
            world = None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, "own")


def test_lists_contain_only_what_the_caller_may_see(world: World) -> None:
    other = world.client.post("/jobs", content=spec_body(project="other")).json()["id"]
    secret = world.secret("viewer")
    mine = {"authorization": f"Bearer {secret}"}
    assert [job["id"] for job in world.client.get("/jobs", headers=mine).json()["data"]] == [world.job]
    assert world.client.get("/jobs?project=other", headers=mine).json()["data"] == []
    assert [job["id"] for job in world.client.get("/jobs").json()["data"]] == [other, world.job]
    for path in ("/keys", "/audit", "/webhooks"):
        answer = world.client.get(path, headers=mine)
        assert code_of(answer) == (403, "forbidden")
        assert "is not an admin of any project; ask an admin" in answer.json()["detail"]
    assert world.client.get("/me", headers=mine).json()["roles"] == {"own": "viewer"}


def test_metrics_need_a_viewer_of_all_projects(world: World) -> None:
    _, secret = world.key({ANY: "viewer"})
    answer = world.client.get("/metrics", headers={"authorization": f"Bearer {secret}"})
    assert (answer.status_code, 'project="own"' in answer.text) == (200, True)


def test_key_secret_is_shown_once_and_not_stored(world: World) -> None:
    key_id, secret = world.key({"own": "editor", "b": "viewer"})
    assert secret.startswith(f"trainshed_{key_id.removeprefix('key-')}_")
    assert len(bytes.fromhex(secret.rpartition("_")[2])) == 32
    assert secret not in world.client.get("/keys").text + world.client.get("/audit").text
    assert secret.rpartition("_")[2] not in repr(world.service.keys)


def test_key_with_wrong_secret_is_unauthorized(world: World) -> None:
    _, secret = world.key({"own": "admin"})
    for wrong in (secret[:-1] + "x", secret[:-65], "trainshed", "trainshed__", f"trainshed_none_{'0' * 64}", "ü"):
        answer = world.client.get("/me", headers=[(b"authorization", f"Bearer {wrong}".encode())])
        assert code_of(answer) == (401, "unauthorized")
    assert world.client.get("/me", headers={"authorization": f"bearer {secret}"}).status_code == 200


def test_admin_cannot_create_or_revoke_keys_beyond_own_projects(world: World) -> None:
    _, secret = world.key({"own": "admin"})
    mine = {"authorization": f"Bearer {secret}"}
    for roles in ({"own": "admin", "other": "viewer"}, {ANY: "viewer"}):
        assert world.client.post("/keys", json={"name": "x", "roles": roles}, headers=mine).status_code == 403
    both, _ = world.key({"own": "editor", "other": "viewer"})
    assert both in [key["id"] for key in world.client.get("/keys", headers=mine).json()["data"]]
    assert code_of(world.client.delete(f"/keys/{both}", headers=mine)) == (403, "forbidden")


def test_admin_sees_no_roles_of_keys_in_other_projects(world: World) -> None:
    _, secret = world.key({"own": "admin"})
    mine = {"authorization": f"Bearer {secret}"}
    both, _ = world.key({"own": "editor", "secret-project": "viewer"})
    world.key({"secret-project": "admin"})
    world.key({ANY: "viewer"})
    answer = world.client.get("/keys", headers=mine)
    shown = {key["id"]: (key["roles"], key["shared"]) for key in answer.json()["data"]}
    assert shown[both] == ({"own": "editor"}, True)
    assert all(roles.keys() == {"own"} for roles, _ in shown.values())
    refused = world.client.delete(f"/keys/{both}", headers=mine)
    assert code_of(refused) == (403, "forbidden")
    assert "secret-project" not in answer.text + refused.text
    everything = {key["id"]: key for key in world.client.get("/keys").json()["data"]}
    assert everything[both]["roles"] == {"own": "editor", "secret-project": "viewer"}
    assert not any(key["shared"] for key in everything.values())


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"name": "", "roles": {"own": "viewer"}}, "/name"),
        ({"name": "a\0b", "roles": {"own": "viewer"}}, "/name"),
        ({"name": "x", "roles": {}}, "/roles"),
        ({"name": "x", "roles": {"own": "owner"}}, "/roles/own"),
        ({"name": "x", "roles": {"Own!": "viewer"}}, "/roles/Own!/[key]"),
        ({"name": "x", "roles": {"own": "viewer"}, "expires_at": "1970-01-01T00:00:01Z"}, "/expires_at"),
        ({"name": "x", "roles": {"own": "viewer"}, "expires_at": "2026-01-01"}, "/expires_at"),
        ({"name": "x", "roles": {"own": "viewer"}, "expires_at": 4102444800}, "/expires_at"),
        ({"name": "x", "roles": {"own": "viewer"}, "expires_at": "9999-12-31T23:59:59-12:00"}, "/expires_at"),
    ],
)
def test_invalid_key_is_rejected(world: World, body: dict[str, Any], pointer: str) -> None:
    answer = world.client.post("/keys", json=body)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


def test_same_idempotency_key_of_two_callers_makes_two_jobs(world: World) -> None:
    found = [
        world.client.post(
            "/jobs",
            content=spec_body(project="own"),
            headers={"authorization": f"Bearer {secret}", "idempotency-key": "k"},
        )
        for secret in (KEY, world.secret("editor"), world.secret("editor"))
        for _ in range(2)
    ]
    assert [answer.status_code for answer in found] == [201, 200] * 3
    assert len({answer.json()["id"] for answer in found}) == 3


@pytest.mark.parametrize("body", [{}, {"from_checkpoint": 0}])
def test_clone_in_another_project_needs_an_editor_of_both(world: World, body: dict[str, Any]) -> None:
    path, body = f"/jobs/{world.job}/clone", body | {"overrides": {"project": "mine"}}
    for roles, status in (
        ({"own": "viewer", "mine": "editor"}, 403),
        ({"own": "editor", "mine": "viewer"}, 403),
        ({"own": "editor", "mine": "editor"}, 201),
    ):
        _, secret = world.key(roles)
        answer = world.client.post(path, json=body, headers={"authorization": f"Bearer {secret}"})
        assert answer.status_code == status, roles
    assert answer.json()["project"] == "mine"


def test_clone_in_another_project_is_in_the_audit_log_of_both(world: World) -> None:
    clone = world.client.post(f"/jobs/{world.job}/clone", json={"overrides": {"project": "mine"}}).json()["id"]
    (newest, *_) = world.client.get("/audit?project=own").json()["data"]
    assert (newest["action"], newest["target"], newest["after"]["project"]) == ("job.clone", world.job, "mine")
    assert [deed["target"] for deed in world.client.get("/audit?project=mine").json()["data"]] == [clone]
    world.client.post(f"/jobs/{world.job}/clone", json={})
    assert world.client.get("/audit?project=own").json()["data"][0]["action"] == "job.submit"


def test_audit_log_names_caller_action_and_change(world: World) -> None:
    key_id, secret = world.key({"own": "editor"})
    headers = {"authorization": f"Bearer {secret}", "x-request-id": "abc-1"}
    assert world.client.post(f"/jobs/{world.job}/pause", headers=headers).status_code == 200
    assert world.client.post(f"/jobs/{world.job}/pause", headers=headers).status_code == 200
    first = world.client.get("/audit?limit=1").json()
    (deed,) = first["data"]
    assert {name: deed[name] for name in ("key_id", "key_name", "request_id", "action", "project", "target")} == {
        "key_id": key_id,
        "key_name": "alice",
        "request_id": "abc-1",
        "action": "job.pause",
        "project": "own",
        "target": world.job,
    }
    assert (deed["before"]["state"], deed["after"]["state"]) == ("QUEUED", "PAUSING")
    rest = world.client.get(f"/audit?after={first['next']}").json()
    assert [one["action"] for one in rest["data"]] == ["key.create", "webhook.create", "key.create", "job.submit"]
    assert not rest["has_more"]


def test_every_answer_has_a_request_id(world: World) -> None:
    given = [world.client.get("/healthz", headers={"x-request-id": sent}) for sent in ("mine.1", "not plain", "x" * 65)]
    found = [answer.headers["x-request-id"] for answer in given]
    assert found[0] == "mine.1"
    assert len(set(found)) == 3
    assert all(len(one) == 26 for one in found[1:])
    refused = world.client.get("/jobs", headers={"authorization": "", "x-request-id": "r1"})
    assert refused.headers["x-request-id"] == "r1"
    assert TestClient(world.service.app(), base_url="http://evil").get("/jobs").headers["x-request-id"]
