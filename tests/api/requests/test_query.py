"""Query parameters: accepted names and values, and errors for the rest."""

import re

import pytest
from fastapi.testclient import TestClient

from tests.support.fakes.service import FakeService, spec_body

OF_JOBS = "this call has after, id, label.KEY, limit, name, project, state"


@pytest.mark.parametrize(
    ("query", "pointer", "message"),
    [
        ("stat=RUNNING", "/query/stat", f"unknown parameter, did you mean state? {OF_JOBS}"),
        ("q=x", "/query/q", f"unknown parameter; {OF_JOBS}"),
        ("label.=x", "/query/label.", f"unknown parameter, did you mean label.KEY? {OF_JOBS}"),
        ("limit=1&limit=2", "/query/limit", "it takes one value, and several are given; leave the others out"),
        ("label.a=1&label.a=2", "/query/label.a", "it takes one value, and several are given; leave the others out"),
    ],
)
def test_unknown_or_repeated_parameter_is_rejected(client: TestClient, query: str, pointer: str, message: str) -> None:
    answer = client.get(f"/jobs?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert answer.json()["errors"] == [{"pointer": pointer, "message": message}]


def _many(name: str, number: int) -> str:
    return "&".join(f"{name.format(one)}=QUEUED" for one in range(number))


@pytest.mark.parametrize(
    ("query", "pointer", "rule"),
    [
        (_many("label.k{}", 17), "/query/label.KEY", "17 values are given; at most 16"),
        (_many("label.k{}", 3000), "/query", "3000 parameters are given; at most 64"),
        (_many("state", 17), "/query/state", "17 values are given; at most 16"),
        (_many("no{}", 65), "/query", "65 parameters are given; at most 64"),
        (f"label.a={'x' * 1024}", "/query/label.a", "it has 1031 characters; at most 1024"),
        (f"id={'a' * 5000}", "/query/id", "it has 5002 characters; at most 1024"),
        (f"{'n' * 2000}=", f"/query/{'n' * 64}", "it has 2000 characters; at most 1024"),
    ],
    ids=["labels", "thousands", "states", "unknown", "long label", "long id", "long name"],
)
def test_query_over_a_limit_is_rejected(client: TestClient, query: str, pointer: str, rule: str) -> None:
    answer = client.get(f"/jobs?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
    assert rule in answer.json()["detail"]


def test_query_with_sixteen_label_filters_is_accepted(client: TestClient) -> None:
    labels = {f"k{number}": "QUEUED" for number in range(16)}
    job_id = client.post("/jobs", content=spec_body(labels=labels)).json()["id"]
    found = client.get(f"/jobs?{_many('label.k{}', 16)}&{_many('state', 16)}").json()["data"]
    assert [job["id"] for job in found] == [job_id]


def test_every_call_rejects_unknown_parameters(client: TestClient, service: FakeService) -> None:
    for path, methods in service.app().openapi()["paths"].items():
        for method in methods:
            place = re.sub(r"{\w+}", "1", path)
            answer = client.request(method, f"{place}?not.a.parameter=1").json()
            assert answer["errors"][0]["pointer"] == "/query/not.a.parameter", (method, path)
            status = client.request(method, f"{place}?not.a.parameter=1", headers={"authorization": ""}).status_code
            assert status == (422 if path in ("/healthz", "/readyz", "/schemas/job.json") else 401), (method, path)


def test_unknown_parameter_error_lists_the_parameters_of_the_call(client: TestClient) -> None:
    assert client.get("/me?x=1").json()["detail"] == "/query/x: unknown parameter; this call has none"
    assert "dtype, form, include, weights" in client.get("/jobs/job-1/checkpoints/1/export?x=1").json()["detail"]


def test_states_and_levels_are_read_in_any_case(client: TestClient) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    assert [job["id"] for job in client.get("/jobs?state=queued&state=Paused").json()["data"]] == [job_id]
    assert client.get("/jobs?state=paused").json()["data"] == []
    assert client.get(f"/jobs/{job_id}/logs?level=warning").status_code == 200


def test_jobs_are_filtered_by_id_prefix(client: TestClient) -> None:
    ids = [client.post("/jobs", content=spec_body()).json()["id"] for _ in range(11)]
    for prefix, found in (("job-0011", ids[10:]), ("001", ids[9:]), ("JOB-000", ids[:9]), ("job-1", [])):
        answer = client.get("/jobs", params={"id": prefix}).json()
        assert [job["id"] for job in answer["data"]] == found[::-1]
