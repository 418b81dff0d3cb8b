"""Idempotency keys: one job per key, whether or not the check of its spec is cached."""

import hashlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from service.ports import Cancellation, IdempotencyKey, NewJob, PreflightReport
from tests.support.fakes.service import FakeService, a_job, spec_body
from tests.support.fakes.stores import MemoryPreflight
from train_loop.run_dir import Parent
from train_loop.spec import AnyJobSpec, Problem

BODIES = (spec_body(), spec_body(priority=1))


@pytest.fixture(autouse=True, params=["unchecked", "checked"])
def specs(request: pytest.FixtureRequest, client: TestClient) -> None:
    """Run each test with specs whose check is cached and with specs that are checked first."""
    if request.param == "checked":
        for body in BODIES:
            assert client.post("/jobs/plan", content=body).status_code == 200


def test_same_idempotency_key_gives_the_same_job(client: TestClient) -> None:
    key = {"Idempotency-Key": "k1"}
    first, second = (client.post("/jobs", content=spec_body(), headers=key) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    assert len(client.get("/jobs").json()["data"]) == 1


def test_replay_does_not_check_the_spec_again(client: TestClient, service: FakeService) -> None:
    key = {"Idempotency-Key": "k1"}
    client.post("/jobs", content=spec_body(), headers=key)
    service.cluster.total = {"CPU": 2.0}
    assert client.post("/jobs", content=spec_body(), headers=key).status_code == 200


def test_idempotency_key_with_another_body_is_rejected(client: TestClient) -> None:
    key = {"Idempotency-Key": "k1"}
    client.post("/jobs", content=spec_body(), headers=key)
    answer = client.post("/jobs", content=spec_body(priority=1), headers=key)
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_mismatch")


def test_key_of_a_rejected_spec_can_be_used_again(client: TestClient, service: FakeService) -> None:
    key, body = {"Idempotency-Key": "k1"}, spec_body(priority=2)
    service.preflight.problems = [Problem("/data", "bad")]
    assert client.post("/jobs", content=body, headers=key).status_code == 422
    service.preflight.problems = []
    assert client.post("/jobs", content=body, headers=key).status_code == 201


def test_key_in_flight_is_a_conflict(client: TestClient, service: FakeService) -> None:
    key, begun, proceed = {"Idempotency-Key": "k2"}, threading.Event(), threading.Event()
    slow = spec_body(name="slow")

    def check(
        spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        begun.set()
        proceed.wait(30)
        return MemoryPreflight.check(service.preflight, spec, parent)

    service.preflight.check = check  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(client.post, "/jobs", content=slow, headers=key)
        assert begun.wait(30)
        again, other = (client.post("/jobs", content=body, headers=key) for body in (slow, spec_body(name="other")))
        proceed.set()
        assert first.result().status_code == 201
    assert (again.status_code, again.json()["code"]) == (409, "idempotency_in_flight")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    assert client.post("/jobs", content=slow, headers=key).json()["id"] == first.result().json()["id"]


def test_key_that_another_replica_used_meanwhile_gives_its_job(client: TestClient, service: FakeService) -> None:
    body = spec_body(name="raced")
    once = IdempotencyKey("k3", hashlib.sha256(body.encode()).hexdigest(), "")

    def check(
        spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        service.store.add(NewJob(a_job("job-theirs", now=service.clock.now), once))
        return MemoryPreflight.check(service.preflight, spec, parent)

    service.preflight.check = check  # type: ignore[method-assign]
    answer = client.post("/jobs", content=body, headers={"Idempotency-Key": "k3"})
    assert (answer.status_code, answer.json()["id"]) == (200, "job-theirs")


def test_concurrent_requests_make_one_job_per_key(client: TestClient) -> None:
    keys = [f"k{number % 10}" for number in range(60)]

    def submit(key: str) -> tuple[str, int, str | None]:
        answer = client.post("/jobs", content=spec_body(), headers={"Idempotency-Key": key})
        return key, answer.status_code, answer.json().get("id")

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(submit, keys))
    assert Counter(key for key, status, _ in answers if status == 201) == dict.fromkeys(keys, 1)
    assert {status for _, status, _ in answers} <= {200, 201, 409}
    assert len({(key, job) for key, _, job in answers if job}) == len(client.get("/jobs").json()["data"]) == 10


def test_invalid_spec_under_a_used_key_is_an_idempotency_mismatch(client: TestClient) -> None:
    client.post("/jobs", content=spec_body(), headers={"Idempotency-Key": "k1"})
    answer = client.post("/jobs", content="{}", headers={"Idempotency-Key": "k1"})
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_mismatch")


def test_submits_without_a_key_make_separate_jobs(client: TestClient) -> None:
    answers = [client.post("/jobs", content=body) for body in (spec_body(), spec_body(), spec_body(name="x" * 9000))]
    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert len(client.get("/jobs").json()["data"]) == 2
