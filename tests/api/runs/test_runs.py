"""Events, metrics and logs of a run over HTTP."""

import pytest
from fastapi.testclient import TestClient

from tests.support.fakes.service import FakeService, spec_body


@pytest.fixture
def job_id(client: TestClient) -> str:
    return str(client.post("/jobs", content=spec_body()).json()["id"])


@pytest.mark.parametrize("kind", ["events", "metrics"])
def test_lines_of_all_attempts_page_by_cursor(client: TestClient, service: FakeService, job_id: str, kind: str) -> None:
    for attempt in (1, 2):
        for step in (1, 2):
            service.event(job_id, f"e{step}", attempt=attempt)
            service.metric(job_id, attempt=attempt, step=step)
    url = f"/jobs/{job_id}/{kind}"
    first = client.get(url, params={"limit": 3}).json()
    assert [(line["attempt"], line["seq"]) for line in first["data"]] == [(1, 1), (1, 2), (2, 1)]
    assert (first["has_more"], first["next"]) == (True, "2.1")
    second = client.get(url, params={"limit": 3, "after": "2.1"}).json()
    assert ([line["seq"] for line in second["data"]], second["has_more"], second["next"]) == ([2], False, "2.2")
    assert client.get(url, params={"after": "2.2"}).json() == {"data": [], "has_more": False, "next": "2.2"}


def test_logs_of_driver_and_rank_page_by_cursor(client: TestClient, service: FakeService, job_id: str) -> None:
    for attempt in (1, 2):
        folder = service.run_dir(job_id).attempt(attempt)
        folder.logs.mkdir(parents=True)
        folder.driver_log.write_text(f"driver {attempt}\nunfinished")
        folder.rank_log(1).write_text(f"rank one of {attempt}\n")
    url = f"/jobs/{job_id}/logs"
    assert client.get(url).json() == {"data": ["driver 2"], "has_more": False, "next": "2.9"}
    assert client.get(url, params={"rank": 1, "attempt": 1}).json()["data"] == ["rank one of 1"]
    assert client.get(url, params={"after": "2.9"}).json()["data"] == []
    first = client.get(url, params={"after": "1.0"}).json()
    assert (first["data"], first["next"]) == (["driver 1"], "1.9")
    # All lines of an attempt come before the lines of the next one.
    assert client.get(url, params={"after": "1.9"}).json()["data"] == ["driver 2"]
    assert client.get(url, params={"after": "1.9", "attempt": 1}).json()["data"] == []
    unknown_rank = client.get(url, params={"rank": 2})
    assert (unknown_rank.status_code, unknown_rank.json()["errors"]) == (
        422,
        [
            {
                "pointer": "/query/rank",
                "message": "rank 2 not found: the job has had 2 workers at most; ask for a rank from 0 to 1",
            }
        ],
    )


LOG = """\
2026-11-22 20:00:00,000 INFO train_loop.train: step 1
2026-11-22 20:00:01,000 ERROR train_loop.train: it broke
Traceback (most recent call last):
ValueError: step 1
2026-11-22 20:00:02,000 WARNING train_loop.train: step 2
"""


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [
        ({}, [0, 1, 4]),
        ({"raw": "true"}, [0, 1, 2, 3, 4]),
        ({"contains": "step"}, [0, 4]),
        ({"contains": "step", "raw": "true"}, [0, 3, 4]),
        ({"level": "WARNING"}, [1, 4]),
        ({"level": "WARNING", "raw": "true"}, [1, 2, 3, 4]),
        ({"level": "ERROR", "contains": "step", "raw": "true"}, [3]),
        ({"contains": "none of it"}, []),
    ],
)
def test_logs_are_filtered_by_text_and_level(
    client: TestClient, service: FakeService, job_id: str, wanted: dict[str, str], lines: list[int]
) -> None:
    path = service.run_dir(job_id).attempt(1).driver_log
    path.parent.mkdir(parents=True)
    path.write_text(LOG)
    page = client.get(f"/jobs/{job_id}/logs", params=wanted).json()
    assert page == {"data": [LOG.splitlines()[line] for line in lines], "has_more": False, "next": f"1.{len(LOG)}"}


def test_metrics_are_downsampled_with_their_extremes(client: TestClient, service: FakeService, job_id: str) -> None:
    losses = [3.0, 1.0, 2.0, 9.0, 2.5, 2.4, float("nan"), 2.2, 2.1, 0.5]
    for step, loss in enumerate(losses, start=1):
        service.metric(job_id, step=step, loss=loss)
    page = client.get(f"/jobs/{job_id}/metrics", params={"points": 4}).json()
    assert [line["step"] for line in page["data"]] == [2, 7, 9, 10]
    assert (page["has_more"], page["next"]) == (False, "1.10")
    assert len(client.get(f"/jobs/{job_id}/metrics", params={"points": 10}).json()["data"]) == len(losses)


def test_job_without_a_run_directory_has_empty_pages(client: TestClient, job_id: str) -> None:
    assert client.get(f"/jobs/{job_id}/events").json() == {"data": [], "has_more": False, "next": "0.0"}
    assert client.get(f"/jobs/{job_id}/logs").json() == {"data": [], "has_more": False, "next": "1.0"}
    assert client.get(f"/jobs/{job_id}/checkpoints").json() == {"data": []}


def test_openapi_document_describes_the_job_spec(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    content = described["paths"]["/jobs"]["post"]["requestBody"]["content"]
    kinds = [f"#/components/schemas/{name}" for name in ("JobSpec", "InferJobSpec")]
    assert content["application/yaml"]["schema"] == {"oneOf": [{"$ref": kind} for kind in kinds]}
    spec = described["components"]["schemas"]["JobSpec"]
    assert sorted(spec["required"]) == ["data", "name", "training"]
    assert client.get("/docs").status_code == 200


def test_events_are_filtered_by_text(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    for number in range(3):
        service.event(job_id, "checkpoint_committed", step=number)
        service.event(job_id, "warning", message=f"number {number}")
    page = client.get(f"/jobs/{job_id}/events", params={"contains": "warning", "limit": 2}).json()
    assert ([line["message"] for line in page["data"]], page["has_more"]) == (["number 0", "number 1"], True)
    rest = client.get(f"/jobs/{job_id}/events", params={"contains": "warning", "after": page["next"]}).json()
    assert ([line["message"] for line in rest["data"]], rest["has_more"]) == (["number 2"], False)


def test_line_that_is_nested_too_deeply_is_skipped(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    service.event(job_id, "before")
    with service.run_dir(job_id).attempt(1).events.open("a") as file:
        for depth in (60, 70, 300, 900, 100_000):
            file.write(f'{{"event": "x", "attempt": 1, "seq": {depth}, "v": {"[" * depth}{"]" * depth}}}\n')
    assert [event["event"] for event in client.get(f"/jobs/{job_id}/events").json()["data"]] == ["before", "x"]
