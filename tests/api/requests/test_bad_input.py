"""Rejected requests: status, code, pointer, and a message with rule, value and remedy."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from service.domain.access.roles import OPERATOR
from service.ports import Cancellation, NewJob, PreflightReport
from service.use_cases.jobs.audit_entries import action_entry
from tests.support.fakes.service import KEY, FakeService, a_job, raw_spec, spec_body
from tests.support.fakes.stores import MemoryPreflight
from train_loop.run_dir import Parent
from train_loop.spec import AnyJobSpec, Problem


def problems(client: TestClient, spec: Any) -> list[tuple[str, str]]:
    answer = client.post("/jobs", json=spec)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert answer.json()["code"] == "invalid_spec"
    assert client.post("/jobs/plan", json=spec).json() == answer.json()
    return [(error["pointer"], error["message"]) for error in answer.json()["errors"]]


CASES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"training": {"lerning_rate": 1}},
        "/training/lerning_rate",
        "no such field; did you mean learning_rate?",
    ),
    (
        {"training": {"max_steps": "many"}},
        "/training/max_steps",
        'input should be a valid integer; the value is "many"',
    ),
    (
        {"strategy": {"fsdp_size": 3}, "scaling": {"num_workers": 4}},
        "/strategy/fsdp_size",
        "fsdp_size=3 does not divide the 4 workers; choose 1, 2 or 4, or 0 to shard over all of them",
    ),
    (
        {"strategy": {"ulysses_size": 3}, "scaling": {"num_workers": 3}, "data": {"sequence_length": 129}},
        "/strategy/ulysses_size",
        "ulysses_size=3 does not divide num_attention_heads=4; choose 1, 2 or 4",
    ),
    (
        {"strategy": {"ulysses_size": 4}, "scaling": {"num_workers": 2}},
        "/strategy/ulysses_size",
        "ulysses_size=4 does not divide the 2 ranks of an fsdp group; choose 1 or 2",
    ),
    (
        {"strategy": {"ulysses_size": 2}, "data": {"sequence_length": 127}},
        "/strategy/ulysses_size",
        "ulysses_size=2 does not divide sequence_length=127; choose a multiple of 2, for example 128",
    ),
    (
        {"model": {"path": "file:///m"}},
        "/model",
        "exactly one of model.path and model.config is needed, and both are given; remove one",
    ),
    (
        {"model": {"config": None}},
        "/model",
        "exactly one of model.path, model.config and code is needed, and none is given; add one of them",
    ),
    (
        {"scaling": {"num_workers": 8}},
        "/scaling/resources_per_worker",
        "8 workers x 1 CPU take 8 of the cluster's 8 CPUs and leave less than the 1 that Ray Data needs; "
        "choose at most 0.875 CPU per worker, or fewer workers",
    ),
]


@pytest.mark.parametrize(("parts", "pointer", "message"), CASES)
def test_spec_that_breaks_a_rule_is_rejected(
    client: TestClient, parts: dict[str, Any], pointer: str, message: str
) -> None:
    assert problems(client, raw_spec(**parts)) == [(pointer, message)]


def test_missing_required_field_is_rejected(client: TestClient) -> None:
    spec = raw_spec()
    del spec["training"]["learning_rate"]
    assert problems(client, spec) == [("/training/learning_rate", "this field is required")]


def test_problems_of_data_plan_and_resources_are_reported_together(client: TestClient, service: FakeService) -> None:
    service.preflight.problems = [Problem("/data/train/path", "no such folder")]
    found = problems(client, raw_spec(scaling={"num_workers": 8}, strategy={"ulysses_size": 8}))
    assert [pointer for pointer, _ in found] == [
        "/scaling/resources_per_worker",
        "/strategy/ulysses_size",
        "/data/train/path",
    ]


def test_model_of_unknown_shape_reports_only_its_problem(client: TestClient, service: FakeService) -> None:
    service.preflight.problems = [Problem("/model/path", "holds no config.json")]
    found = problems(client, raw_spec(model={"config": None, "path": "file:///m"}))
    assert found == [("/model/path", "holds no config.json")]


def test_body_that_is_not_a_mapping_is_rejected(client: TestClient) -> None:
    assert problems(client, [1]) == [
        ("", "a job spec is a mapping of fields, not a list; write name: VALUE for each field")
    ]


@pytest.mark.parametrize(
    "body",
    [
        '!!int "x"',
        "!!float x",
        "!!timestamp x",
        "!!bool x",
        f'{{"priority": {"9" * 5000}}}',
        "{",
        "a: *unknown",
        'name: !!int ""',
        'name: !!float ""',
        "name: !!map [1]",
        "name: !!set [1]",
        "name: !!python/object/apply:os.getcwd []",
        "? [a]\n: b",
        "a: 1\n---\na: 2",
        '"\\ud800": 1\n"x',
    ],
)
def test_unreadable_body_is_rejected_with_its_line(client: TestClient, body: str) -> None:
    answer = client.post("/jobs", content=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
    (error,) = answer.json()["errors"]
    assert "line " in error["message"]


@pytest.mark.parametrize(
    ("body", "pointer", "rule"),
    [
        (b"[" * 8190, "", "nested"),
        (b"a: " + b"[" * 40 + b"]" * 40, "/a" + "/0" * 31, "nested over 32"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "/a" + "/0" * 31, "nested over 32"),
        (b'{"name": "\\ud800"}', "/name", "lone surrogate"),
        (b'{"data": {"train": {"path": "/a\\u0000b"}}}', "/data/train/path", "NUL character"),
        (b'{"labels": {"a\\u0000b": "c"}}', "/labels", "NUL character"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "", "given twice"),
        (b'{"priority": 1e999}', "/priority", "not a JSON number"),
        (b"priority: .inf", "/priority", "not a JSON number"),
        (b"priority: 1" + b":59" * 1000 + b".5", "/priority", "valid integer"),
    ],
)
def test_hostile_body_is_rejected_with_its_pointer(client: TestClient, body: bytes, pointer: str, rule: str) -> None:
    answer = client.post("/jobs", content=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
    assert any(one["pointer"] == pointer and rule in one["message"] for one in answer.json()["errors"]), answer.text


@pytest.mark.parametrize("path", ["/jobs/%00", "/jobs?project=a%00b", "/jobs?label.team=%00"])
def test_nul_character_in_url_is_rejected(client: TestClient, path: str) -> None:
    code, _, detail = refusal(client, "GET", path)
    assert code == 422, detail


def test_label_with_control_character_is_rejected(client: TestClient) -> None:
    ((pointer, _),) = problems(client, raw_spec(labels={"team": "a\0b"}))
    assert pointer == "/labels/team"


@pytest.mark.parametrize(
    "character", ["\x1b", "\x7f", "\x9b", "\x85", "\u200b", "\u2028", "\u202e", "\ufeff"], ids=ascii
)
def test_hidden_characters_in_labels_and_names_are_rejected(client: TestClient, character: str) -> None:
    ((pointer, message),) = problems(client, raw_spec(labels={"team": f"a{character}b"}))
    assert (pointer, f"U+{ord(character):04X}" in message) == ("/labels/team", True)
    ((pointer, _),) = problems(client, raw_spec(labels={f"a{character}b": "team"}))
    assert (pointer.startswith("/labels/a"), character in pointer) == (True, False)
    for name, project in (("x", f"a{character}b"), (f"a{character}b", "default")):
        code, _, detail = refusal(client, "POST", "/keys", json={"name": name, "roles": {project: "viewer"}})
        assert code == 422, detail
    hook = {"project": "default", "url": f"https://hooks.example/{character}"}
    assert refusal(client, "POST", "/webhooks", json=hook)[0] == 422
    job_id = client.post("/jobs", json=raw_spec()).json()["id"]
    changes = {"overrides": {"labels": {"team": character}}}
    assert refusal(client, "POST", f"/jobs/{job_id}/clone", json=changes)[0] == 422


def test_invalid_label_of_an_older_version_does_not_prevent_a_clone(client: TestClient, service: FakeService) -> None:
    job = a_job("job-old", labels={"team": "a\u200db"})
    service.store.add(NewJob(job, None, (action_entry(OPERATOR, "submit", job, before={}, after={}, now=0.0),)))
    assert client.get("/jobs/job-old").json()["spec"]["labels"] == {"team": "a\u200db"}
    answer = client.post("/jobs/job-old/clone", json={"overrides": {"labels": {"other": "x"}}})
    assert answer.status_code == 201, answer.text


def test_usage_accepts_the_last_representable_day(client: TestClient) -> None:
    assert client.get("/usage", params={"since": "0001-01-01", "until": "9999-12-31"}).json() == {"data": []}


def refusal(client: TestClient, method: str, path: str, **arguments: Any) -> tuple[int, str, str]:
    answer = client.request(method, path, **arguments)
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    return answer.status_code, body["code"], body["detail"]


@pytest.mark.parametrize("path", ["/jobs", "/jobs/job-1", "/jobs/job-1/events"])
@pytest.mark.parametrize("given", ["", "Bearer wrong", "Basic abc", f"Bearer {KEY}x"])
def test_missing_or_wrong_key_is_unauthorized(service: FakeService, path: str, given: str) -> None:
    with service.client(authorization=given) as client:
        status, code, detail = refusal(client, "GET", path)
        assert (status, code) == (401, "unauthorized")
        assert "$TRAINSHED_HOME/admin.key" in detail
        assert client.get(path).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["", "/events", "/metrics", "/logs", "/checkpoints"])
def test_unknown_job_returns_404(client: TestClient, path: str) -> None:
    expected = (404, "job_not_found", "job job-x not found; list jobs with GET /jobs")
    assert refusal(client, "GET", f"/jobs/job-x{path}") == expected
    assert refusal(client, "POST", "/jobs/job-x/cancel") == expected


def test_unknown_route_returns_404_and_unknown_method_405(client: TestClient) -> None:
    assert refusal(client, "GET", "/nothing")[:2] == (404, "not_found")
    assert refusal(client, "PUT", "/jobs")[:2] == (405, "method_not_allowed")
    assert refusal(client, "GET", "/jobs/")[:2] == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/jobs", "GET, POST"),
        ("POST", "/jobs/job-1", "GET, DELETE"),
        ("GET", "/jobs/plan", "POST"),
        ("OPTIONS", "/jobs/plan", "POST"),
        ("PATCH", "/jobs/job-1/checkpoints/10/pin", "POST, DELETE"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ],
)
def test_wrong_method_returns_405_with_allowed_methods(
    client: TestClient, method: str, path: str, allowed: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers["allow"], answer.json()["code"]) == (405, allowed, "method_not_allowed")


def test_body_over_the_limit_returns_413(client: TestClient) -> None:
    expected = (413, "body_too_large", "the body is over 65536 bytes; a job spec is text, send less of it")
    assert refusal(client, "POST", "/jobs", content=b"x" * 65537) == expected


def test_chunked_body_over_the_limit_returns_413(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield b"x" * 20000

    assert refusal(client, "POST", "/jobs", content=chunks())[:2] == (413, "body_too_large")


def test_foreign_host_header_is_rejected(client: TestClient) -> None:
    expected = (400, "host_refused", "Host 'evil.example' is not allowed; use localhost, or add it to ")
    status, code, detail = refusal(client, "GET", "/healthz", headers={"host": "evil.example"})
    assert (status, code, detail) == (*expected[:2], f"{expected[2]}TRAINSHED_ALLOWED_HOSTS")
    for host in (
        "[::1].evil",
        "[::1]evil",
        "[::1]:9.evil",
        "[::1",
        "localhost:80.evil",
        "localhost:80:90",
        "[localhost]",
    ):
        assert refusal(client, "GET", "/healthz", headers={"host": host})[:2] == expected[:2]
    for host in ("localhost:8000", "127.0.0.1", "[::1]:9", "[::1]"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("path", "pointer"),
    [
        ("/jobs?limit=0", "/query/limit"),
        ("/jobs?state=NONE", "/query/state/0"),
        ("/jobs/{id}/events?after=x", "/query/after"),
        ("/jobs/{id}/logs?rank=-1", "/query/rank"),
        (f"/jobs/{{id}}/logs?attempt={10**400}", "/query/attempt"),
        (f"/jobs/{{id}}/checkpoints/{10**400}/export", "/path/step"),
        (f"/audit?after={10**400}", "/query/after"),
        ("/jobs?id=job-%ff", "/query/id"),
        ("/jobs?after=zz", "/query/after"),
        ("/jobs/{id}/logs?attempt=2", "/query/attempt"),
        ("/usage?since=0", "/query/since"),
        ("/usage?since=2026-01-02&until=2026-01-01", "/query/since"),
    ],
)
def test_invalid_parameter_is_rejected_with_its_pointer(client: TestClient, path: str, pointer: str) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    answer = client.get(path.format(id=job_id)).json()
    assert (answer["code"], [error["pointer"] for error in answer["errors"]]) == ("invalid_request", [pointer])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/keys", b'{"name": "x", "roles": {"a": "viewer", "a": "admin"}}'),
        ("/jobs/{id}/clone", b'{"overrides": {"priority": 1, "priority": 2}}'),
        ("/webhooks", b'{"project": "a", "project": "b", "url": "https://hooks.example/x"}'),
    ],
)
def test_name_that_is_given_twice_is_rejected(client: TestClient, path: str, body: bytes) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    answer = client.post(path.format(id=job_id), content=body)
    assert answer.status_code == 422
    assert "is given twice in one object; remove one" in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan", "/keys", "/jobs/{id}/cancel", "/jobs/{id}/clone"])
@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b'{"name": "\\ud800"}', b'{"project": "\\u0000", "name": "a\\u0000"}', b"\0"]
)
def test_body_that_is_not_text_is_rejected(client: TestClient, path: str, body: bytes) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    assert refusal(client, "POST", path.format(id=job_id), content=body)[0] == 422


def test_cancel_with_unknown_field_is_rejected(client: TestClient) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    answer = client.post(f"/jobs/{job_id}/cancel", json={"grace": 5}).json()
    assert (answer["code"], answer["errors"][0]["pointer"]) == ("invalid_request", "/grace")


class BrokenPreflight(MemoryPreflight):
    def check(
        self, spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        raise RuntimeError("the password is 1234")


def test_internal_error_is_a_problem_without_secrets(service: FakeService) -> None:
    service.preflight = BrokenPreflight()
    headers = {"authorization": f"Bearer {KEY}"}
    client = TestClient(service.app(), "http://127.0.0.1", headers=headers, raise_server_exceptions=False)
    with capture_logs([merge_contextvars]) as logged:
        answer = client.post("/jobs", content=spec_body(), headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["code"], answer.headers["x-request-id"]) == (500, "internal", "mine")
    assert "1234" not in answer.text
    assert [(line["event"], line["request_id"]) for line in logged] == [("request_failed", "mine")]


def test_rejected_path_is_logged_as_sent(service: FakeService) -> None:
    with capture_logs() as logged, service.client(authorization="Bearer wrong") as client:
        assert client.get("/jobs/%1b]0;PWNED%07%0aforged").status_code == 401
    assert [line["path"] for line in logged if line["event"] == "refused"] == ["/jobs/%1b]0;PWNED%07%0aforged"]
