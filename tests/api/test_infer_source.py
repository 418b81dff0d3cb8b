"""Inference jobs over HTTP whose weights are those of a job's checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.domain.jobs.observation import SubmissionStatus
from tests.support.builders.checkpoints import checkpoint
from tests.support.builders.specs import TINY, infer_spec
from tests.support.fakes.service import FakeService, spec_body
from train_loop.checkpoint.retention import retire_others
from train_loop.checkpoint.store.open import open_store
from train_loop.run_dir import Fence, Outcome
from train_loop.spec import CheckpointSpec

CONFIG = {"config": TINY, "dtype": "fp32"}


@pytest.fixture
def trained(client: TestClient, service: FakeService) -> str:
    """Create a job with checkpoints of steps 10 and 20."""
    job_id = str(client.post("/jobs", content=spec_body(model=CONFIG)).json()["id"])
    for step in (10, 20):
        checkpoint(service.run_dir(job_id), step, weights=b"1234567")
    return job_id


def body(job: str, *, data: dict[str, Any] | None = None, project: str = "default", **model: Any) -> str:
    raw = infer_spec(data=data or {}) | {"model": {"job": job, "dtype": "fp32", **model}, "project": project}
    return json.dumps(raw)


def test_checkpoint_is_found_and_its_jobs_model_is_shown(
    client: TestClient, service: FakeService, trained: str
) -> None:
    for wanted, step in (("latest", 20), (10, 10)):
        plan = client.post("/jobs/plan", content=body(trained, step=wanted)).json()
        answer = client.post("/jobs", content=body(trained, step=wanted))
        assert answer.status_code == 201, answer.text
        job = answer.json()
        assert job["parent"] == {"job": trained, "step": step}
        model = {"job": trained, "step": step, "config": TINY, "path": None, "head": "causal_lm"}
        assert job["spec"]["model"] | model == job["spec"]["model"]
        assert plan["parameters"] > 0
        assert (job["progress"]["step"], job["progress"]["unit"]) == (0, "row")
        found = service.run_dir(job["id"]).parent()
        assert found is not None
        assert (found.job, found.run_dir, found.manifest.step) == (trained, service.get(trained).run_dir, step)
        again = client.post("/jobs", content=json.dumps(job["spec"]))
        assert (again.status_code, again.json()["parent"]) == (201, job["parent"]), "a printed spec can be sent again"


def test_checkpoint_is_kept_until_the_job_has_ended(client: TestClient, service: FakeService, trained: str) -> None:
    job_id = client.post("/jobs", content=body(trained, step=10)).json()["id"]

    def kept() -> list[int]:
        run_dir = service.run_dir(trained)
        retire_others(run_dir, open_store(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
        return sorted(run_dir.manifests())

    client.post(f"/jobs/{trained}/cancel")
    reconciler = service.reconciler()
    for _ in range(3):
        reconciler.run_once()
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    reconciler.run_once()
    assert kept() == [10, 20]
    service.end(job_id, Outcome(result="succeeded"))
    reconciler.run_once()
    assert service.get(job_id).state == "SUCCEEDED"
    assert kept() == [20]


def test_clone_reads_the_same_checkpoint_or_that_of_another_job(
    client: TestClient, service: FakeService, trained: str
) -> None:
    job_id = client.post("/jobs", content=body(trained, step=10)).json()["id"]
    other = client.post("/jobs", content=spec_body(model=CONFIG | {"config": TINY | {"vocab_size": 400}})).json()["id"]
    checkpoint(service.run_dir(other), 5, weights=b"1")
    same, newer, another = (
        client.post(f"/jobs/{job_id}/clone", json={"overrides": {"model": model}}).json()
        for model in ({}, {"step": "latest"}, {"job": other, "step": "latest"})
    )
    assert [job["parent"]["step"] for job in (same, newer)] == [10, 20]
    assert another["parent"] == {"job": other, "step": 5}
    assert another["spec"]["model"]["config"]["vocab_size"] == 400


def test_conversations_get_the_chat_template_of_the_job(client: TestClient, service: FakeService) -> None:
    chats = {"columns": {"messages": "chat"}, "chat_template": "tool_use"}
    model = CONFIG | {"tokenizer": "/tokens"}
    job_id = client.post("/jobs", content=spec_body(model=model, data=chats)).json()["id"]
    other = client.post("/jobs", content=spec_body(model=model, data=chats | {"chat_template": None})).json()["id"]
    for one in (job_id, other):
        checkpoint(service.run_dir(one), 5, weights=b"1")
    rows = {"columns": {"messages": "chat", "input_ids": None}}
    job = client.post("/jobs", content=body(job_id, data=rows)).json()
    assert job["spec"]["data"]["chat_template"] == "tool_use"
    own = client.post("/jobs", content=body(job_id, data=rows | {"chat_template": "own"})).json()
    found = [
        client.post(f"/jobs/{one['id']}/clone", json={"overrides": {"model": {"job": other, "step": "latest"}}}).json()
        for one in (job, own)
    ]
    assert [one["spec"]["data"]["chat_template"] for one in found] == [None, "own"]


def test_tokenizer_of_the_jobs_own_data_is_used_for_text(
    client: TestClient, service: FakeService, trained: str, tmp_path: Path
) -> None:
    text = {"columns": {"text": "text"}}
    refused = client.post("/jobs", content=body(trained, data=text)).json()["errors"]
    assert [one["pointer"] for one in refused] == ["/model/tokenizer"]
    own = client.post("/jobs", content=body(trained, data=text, tokenizer="/tokens"))
    assert own.json()["spec"]["model"]["tokenizer"] == "/tokens"
    pointer = service.run_dir(trained).data
    pointer.parent.mkdir(parents=True)
    pointer.write_text(json.dumps({"tokenizer": str(tmp_path / "_cache" / "tokenizer-1")}))
    job = client.post("/jobs", content=body(trained, data=text)).json()
    assert job["spec"]["model"]["tokenizer"] == str(tmp_path / "_cache" / "tokenizer-1")
    tokenised = client.post("/jobs", content=body(trained)).json()
    assert tokenised["spec"]["model"]["tokenizer"] is None


def test_source_that_cannot_be_read_is_refused_at_its_field(
    client: TestClient, service: FakeService, trained: str
) -> None:
    bare = client.post("/jobs", content=spec_body()).json()["id"]
    inferring = client.post("/jobs", content=body(trained)).json()["id"]
    none = "not found; list jobs with GET /jobs"
    for model, pointer, message in [
        ({"job": "job-9"}, "/model/job", f"job job-9 {none}"),
        ({"job": bare}, "/model/job", f"{bare} has no checkpoint yet; wait for its first one"),
        ({"job": inferring}, "/model/job", f"{inferring} is a job of kind: infer, which has no checkpoints; name the"),
        ({"job": trained, "step": 15}, "/model/step", f"checkpoint of step 15 of {trained} not found; available"),
        ({"job": trained, "weights": "ema"}, "/model/weights", f"{trained} has no average of its weights (training."),
        ({"job": trained, "path": "/m"}, "/model/path", f"path is not that of {trained}, whose checkpoint model.job"),
        ({"job": trained, "step": "last"}, "/model/step", 'invalid step "last"; expected a number from 0, or latest'),
        ({"step": 10, "config": TINY}, "/model", "step=10 has no effect without model.job, whose checkpoint it names"),
    ]:
        raw = infer_spec() | {"model": {"dtype": "fp32", **model}}
        for path in ("/jobs", "/jobs/plan"):
            errors = client.post(path, content=json.dumps(raw)).json()["errors"]
            assert [one["pointer"] for one in errors] == [pointer], errors
            assert errors[0]["message"].startswith(message), errors
    key = client.post("/keys", json={"name": "k", "roles": {"other": "admin"}}).json()["secret"]
    with service.client(authorization=f"Bearer {key}") as stranger:
        errors = stranger.post("/jobs", content=body(trained, project="other")).json()["errors"]
    assert [(one["pointer"], one["message"]) for one in errors] == [("/model/job", f"job {trained} {none}")]


def test_weights_of_another_project_need_an_editor_there_and_are_recorded_there(
    client: TestClient, service: FakeService, trained: str
) -> None:
    raw = body(trained, project="other")
    for role, status in (("viewer", 403), ("editor", 201)):
        roles = {"other": "editor", "default": role}
        key = client.post("/keys", json={"name": "k", "roles": roles}).json()["secret"]
        with service.client(authorization=f"Bearer {key}") as caller:
            for path in ("/jobs", "/jobs/plan"):
                answer = caller.post(path, content=raw)
                assert answer.status_code == (status if path == "/jobs" or status == 403 else 200), answer.text
    (entry,) = [one for one in client.get("/audit?project=default").json()["data"] if one["action"] == "job.infer"]
    assert (entry["target"], entry["after"]["project"]) == (trained, "other")
