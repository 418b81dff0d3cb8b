"""Run audit over HTTP, in the client and as a command."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from service.ports import CallCancelled, Cancellation
from service.use_cases.runs.audit import audit_job
from tests.support.clients.command import run
from tests.support.fakes.service import KEY, FakeService, spec_body
from trainshed import Client

BODY = spec_body(training={"audit_samples": True, "max_steps": 5})


def train(service: FakeService, job_id: str, *, wrong: bool = False) -> None:
    """Write five steps of two samples out of ten; the second attempt repeats step 3."""
    for attempt, resumed, last in ((1, 0, 3), (2, 2, 5)):
        fields = {"resumed_from": resumed, "steps": 5, "samples": 10, "global_batch": 2, "world": 2, "epoch": 1}
        service.event(job_id, "training_started", attempt=attempt, **fields)
        for step in range(resumed + 1, last + 1):
            samples = [2 * step - 2, 0 if wrong and step == 5 else 2 * step - 1]
            service.metric(job_id, attempt=attempt, step=step, loss=1.0, samples=samples, epoch=1)
    service.event(job_id, "training_ended", attempt=2, result="succeeded", step=5)


@pytest.fixture
def job_id(client: TestClient) -> str:
    return str(client.post("/jobs", content=BODY).json()["id"])


def test_audit_of_a_run_with_a_second_attempt_is_clean(client: TestClient, service: FakeService, job_id: str) -> None:
    train(service, job_id)
    found = client.get(f"/jobs/{job_id}/audit").json()
    assert (found["clean"], found["steps"], found["samples"], found["lines"]) == (True, 5, 10, 6)
    assert found["repeated"] == {"total": 1, "listed": [{"attempt": 2, "epoch": 1, "resumed_from": 2, "steps": 1}]}


@pytest.mark.parametrize("ends", [{"max_steps": 5, "num_train_epochs": 2}, {"max_steps": 9, "num_train_epochs": 1}])
def test_audit_of_a_run_with_two_ends_expects_the_earlier_one(
    client: TestClient, service: FakeService, ends: dict[str, int]
) -> None:
    job_id = client.post("/jobs", content=spec_body(training={"audit_samples": True} | ends)).json()["id"]
    train(service, job_id)
    assert client.get(f"/jobs/{job_id}/audit").json()["clean"]


def test_audit_names_the_wrong_sample(client: TestClient, service: FakeService, job_id: str) -> None:
    train(service, job_id, wrong=True)
    found = client.get(f"/jobs/{job_id}/audit").json()
    assert found["duplicated"]["listed"] == [{"sample": 0, "data_epoch": 0, "first_step": 1, "step": 5}]
    assert (found["clean"], found["missing_samples"]["listed"]) == (False, [{"sample": 9, "data_epoch": 0}])


def test_audit_ends_if_its_client_has_gone(service: FakeService, job_id: str) -> None:
    train(service, job_id)
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(CallCancelled):
        audit_job(service.run_dirs, service.get(job_id), cancellation)


def test_audit_of_a_run_without_steps_is_clean(client: TestClient, job_id: str) -> None:
    found = client.get(f"/jobs/{job_id}/audit").json()
    assert (found["clean"], found["steps"], found["first_step"]) == (True, 0, None)


def test_audit_without_recorded_samples_is_a_conflict(client: TestClient) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    answer = client.get(f"/jobs/{job_id}/audit")
    assert (answer.status_code, answer.json()["code"]) == (409, "not_audited")
    assert "training.audit_samples: true" in answer.json()["detail"]


def test_audit_command_exits_1_if_anything_is_found(home: Path, url: str, service: FakeService) -> None:
    good, bad = (service.submit(training={"audit_samples": True, "max_steps": 5}).id for _ in range(2))
    train(service, good)
    train(service, bad, wrong=True)
    clean, wrong = run("audit", good, "--allow-repeated"), run("audit", bad, "--allow-repeated")
    assert (clean.exit_code, wrong.exit_code) == (0, 1)
    assert "attempt 2 resumed from step 2: 1 steps again" in clean.stdout
    assert "sample 0 in steps 1 and 5 of data epoch 0" in wrong.stdout
    assert run("audit", good).exit_code == 1, "a step was repeated"
    assert run("audit", good, "--project", "nlp").exit_code == 2
    assert "job.submit" in run("audit").stdout
    with Client(url, KEY) as client:
        assert (client.job(good).audit().clean, client.job(bad).audit().clean) == (True, False)
