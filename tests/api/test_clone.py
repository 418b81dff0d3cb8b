"""Clones over HTTP: jobs that start from the checkpoint of another job."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.domain.jobs.lineage import same_plateau
from service.domain.jobs.observation import SubmissionStatus
from tests.support.builders.checkpoints import checkpoint, unfinished
from tests.support.builders.specs import spec
from tests.support.fakes.service import FakeService, spec_body
from train_loop.checkpoint.retention import retire_others
from train_loop.checkpoint.store.open import open_store
from train_loop.run_dir import Fence, Outcome, RunDir
from train_loop.spec import CheckpointSpec, override


@pytest.fixture
def parent(client: TestClient, service: FakeService) -> str:
    """Create a job with checkpoints of steps 10 and 20."""
    job_id = str(client.post("/jobs", content=spec_body(training={"max_steps": 20})).json()["id"])
    for step in (10, 20):
        checkpoint(service.run_dir(job_id), step, weights=b"1234567")
    return job_id


def clone(client: TestClient, job_id: str, **body: Any) -> Any:
    return client.post(f"/jobs/{job_id}/clone", json=body)


def retire(run_dir: RunDir) -> list[int]:
    """Apply retention with keep_last=1; return the steps of the checkpoints that remain."""
    retire_others(run_dir, open_store(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
    return sorted(run_dir.manifests())


def test_clone_starts_from_the_named_step(client: TestClient, service: FakeService, parent: str) -> None:
    answer = clone(client, parent, from_checkpoint=10, overrides={"name": "again", "training": {"learning_rate": 0.5}})
    job = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"/jobs/{job['id']}")
    assert (job["parent"], job["state"], job["name"]) == ({"job": parent, "step": 10}, "QUEUED", "again")
    assert (job["progress"]["step"], job["progress"]["percent"]) == (10, 50.0)
    expected = client.get(f"/jobs/{parent}").json()["spec"]
    expected["training"]["learning_rate"], expected["name"] = 0.5, "again"
    assert job["spec"] == expected
    found = service.run_dir(job["id"]).parent()
    assert found is not None
    assert (found.job, found.run_dir, found.manifest.step) == (parent, service.get(parent).run_dir, 10)
    assert (found.same_order, found.same_optimizer) == (True, True)
    assert client.get(f"/jobs/{parent}").json()["parent"] is None


def test_clone_of_a_checkpoint_of_another_torch_is_warned_of(
    client: TestClient, service: FakeService, parent: str
) -> None:
    draft = unfinished(service.run_dir(parent), 30, weights=b"1")
    other = draft.model_copy(update={"versions": {"torch": "1.0"}})
    open_store(service.run_dir(parent), Fence(1)).commit(other)
    job = clone(client, parent, overrides={"training": {"max_steps": 40}}).json()
    (warning,) = [one for one in job["warnings"] if "torch" in one]
    assert warning.startswith("the checkpoint of step 30 was written with torch 1.0, and torch ")
    before = clone(client, parent, from_checkpoint=10, overrides={"name": "before"}).json()
    assert not [one for one in before["warnings"] if "torch" in one]


def test_clone_without_a_step_starts_from_the_newest(client: TestClient, parent: str) -> None:
    job = clone(client, parent, overrides={"training": {"max_steps": 30}}).json()
    assert job["parent"] == {"job": parent, "step": 20}


def test_clone_of_step_0_or_of_a_job_without_checkpoints_starts_at_step_0(
    client: TestClient, service: FakeService, parent: str
) -> None:
    bare = client.post("/jobs", content=spec_body()).json()["id"]
    for job in (clone(client, parent, from_checkpoint=0).json(), clone(client, bare).json()):
        assert (job["parent"], job["progress"]["step"]) == (None, 0)
        assert service.run_dir(job["id"]).parent() is None


def test_clone_with_other_order_or_optimizer_records_it_for_the_workers(
    client: TestClient, service: FakeService, parent: str
) -> None:
    changed = {"data": {"seed": 7}, "training": {"optimizer": "sgd"}}
    job = clone(client, parent, from_checkpoint=10, overrides=changed).json()
    found = service.run_dir(job["id"]).parent()
    assert found is not None
    assert (found.same_order, found.same_optimizer) == (False, False)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True),
        ({"training": {"lr_scheduler_kwargs": {"factor": 0.2}}}, True),
        ({"training": {"learning_rate": 0.5}}, False),
        ({"training": {"optimizer": "sgd"}}, False),
        ({"training": {"lr_scheduler_type": "constant"}}, False),
        ({"data": {"eval": {"path": "file:///other/*.jsonl"}}}, False),
    ],
)
def test_clone_keeps_the_state_of_a_plateau_schedule_unless_its_rates_or_evaluations_change(
    changed: dict[str, Any], same: bool
) -> None:
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 2}
    before = spec(training=plateau, data={"eval": {"path": "stdlib://"}})
    assert same_plateau(before, override(before, changed)) is same


def test_dtype_may_be_overridden_in_model_and_in_strategy(client: TestClient, parent: str) -> None:
    for part in ({"model": {"dtype": "bf16"}}, {"strategy": {"param_dtype": "bf16"}}):
        spec = clone(client, parent, from_checkpoint=10, overrides=part).json()["spec"]
        assert (spec["model"]["dtype"], spec["strategy"]["param_dtype"]) == ("bf16", "bf16")


def test_null_in_overrides_sets_the_field_to_null(client: TestClient, parent: str) -> None:
    part = {"training": {"max_grad_norm": None, "max_steps": None, "num_train_epochs": 3}}
    training = clone(client, parent, from_checkpoint=10, overrides=part).json()["spec"]["training"]
    assert (training["max_grad_norm"], training["max_steps"], training["num_train_epochs"]) == (None, None, 3)


def test_parent_checkpoint_is_kept_until_the_clone_has_ended(
    client: TestClient, service: FakeService, parent: str
) -> None:
    job_id = clone(client, parent, from_checkpoint=10).json()["id"]
    assert retire(service.run_dir(parent)) == [10, 20]
    assert [c["pinned"] for c in client.get(f"/jobs/{parent}/checkpoints").json()["data"]] == [False, False]
    client.post(f"/jobs/{parent}/cancel")
    reconciler = service.reconciler()
    for _ in range(3):
        reconciler.run_once()
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    reconciler.run_once()
    assert retire(service.run_dir(parent)) == [10, 20]
    service.end(job_id, Outcome(result="succeeded"))
    reconciler.run_once()
    assert service.get(job_id).state == "SUCCEEDED"
    assert retire(service.run_dir(parent)) == [20]


def test_clone_of_a_run_with_all_epochs_trained_is_rejected(client: TestClient, service: FakeService) -> None:
    training = {"max_steps": None, "num_train_epochs": 1.5}
    job_id = client.post("/jobs", content=spec_body(training=training)).json()["id"]
    service.reconciler().run_once()
    for step in (10, 20):
        checkpoint(service.run_dir(job_id), step, weights=b"1234567")
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    service.end(job_id, Outcome(result="succeeded"))
    service.reconciler().run_once()
    assert service.get(job_id).state == "SUCCEEDED"
    refused = clone(client, job_id).json()["errors"]
    assert [error["pointer"] for error in refused] == ["/training/num_train_epochs"]
    assert "num_train_epochs=1.5 are complete at step 20" in refused[0]["message"]
    assert clone(client, job_id, from_checkpoint=10).status_code == 201
    assert clone(client, job_id, overrides={"training": {"num_train_epochs": 2.0}}).status_code == 201


def test_clone_of_a_run_that_max_steps_ended_may_count_epochs(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body(training={"max_steps": 20, "num_train_epochs": 3})).json()["id"]
    assert service.get(job_id).spec.run.training.epochs == 3
    service.reconciler().run_once()
    checkpoint(service.run_dir(job_id), 20, weights=b"1234567")
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    service.end(job_id, Outcome(result="succeeded"))
    service.reconciler().run_once()
    (refused,) = clone(client, job_id).json()["errors"]
    assert refused["message"].startswith("max_steps=20 is not after step 20")
    assert clone(client, job_id, overrides={"training": {"max_steps": 40}}).status_code == 201
    assert clone(client, job_id, overrides={"training": {"max_steps": None}}).status_code == 201


def test_clone_cancelled_in_the_queue_releases_the_parent_checkpoint(
    client: TestClient, service: FakeService, parent: str
) -> None:
    job_id = clone(client, parent, from_checkpoint=10).json()["id"]
    client.post(f"/jobs/{job_id}/cancel")
    service.reconciler().run_once()
    assert service.get(job_id).state == "CANCELLED"
    assert retire(service.run_dir(parent)) == [20]


def test_idempotency_key_makes_one_clone(client: TestClient, parent: str) -> None:
    key, other = {"Idempotency-Key": "k"}, client.post("/jobs", content=spec_body()).json()["id"]
    answers = [client.post(f"/jobs/{parent}/clone", json={"from_checkpoint": 10}, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    assert answers[0].json()["id"] == answers[1].json()["id"]
    assert client.post(f"/jobs/{other}/clone", json={"from_checkpoint": 10}, headers=key).status_code == 422


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer", "message"),
    [
        ({"from_checkpoint": 15}, 404, "checkpoint_not_found", None, "checkpoint of step 15 of"),
        ({"from_checkpoint": -1}, 422, "invalid_request", "/from_checkpoint", "greater than or equal to 0"),
        ({"overides": {}}, 422, "invalid_request", "/overides", "Extra inputs are not permitted"),
        (
            {},
            422,
            "invalid_spec",
            "/training/max_steps",
            "max_steps=20 is not after step 20 of job-0001, where the clone starts; it includes the steps of the "
            "parent, so choose more than 20",
        ),
        ({"overrides": {"training": {"lerning": 1}}}, 422, "invalid_spec", "/training/lerning", "no such field"),
        (
            {"overrides": {"training": {"max_steps": None, "max_tokens": 20}}},
            422,
            "invalid_spec",
            "/training/max_tokens",
            "max_tokens=20 does not exceed the 20 tokens of step 20 of job-0001, where the clone starts; choose more",
        ),
    ],
)
def test_invalid_clone_is_rejected_and_stores_nothing(
    client: TestClient,
    service: FakeService,
    parent: str,
    body: dict[str, Any],
    status: int,
    code: str,
    pointer: str | None,
    message: str,
) -> None:
    answer = clone(client, parent, **body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    errors = answer.json().get("errors") or [{"pointer": None, "message": answer.json()["detail"]}]
    assert errors[0]["pointer"] == pointer
    assert message in errors[0]["message"]
    assert len(client.get("/jobs").json()["data"]) == 1
    assert retire(service.run_dir(parent)) == [20]


def test_clone_of_a_clone_without_checkpoint_names_the_parents_step(client: TestClient, parent: str) -> None:
    job_id = clone(client, parent, from_checkpoint=10).json()["id"]
    answer = clone(client, job_id).json()
    assert answer["code"] == "illegal_state"
    assert f"clone its parent {parent} from step 10" in answer["detail"]
    assert clone(client, job_id, from_checkpoint=0).status_code == 201


def test_resume_at_a_size_that_needs_another_strategy_names_the_clone(client: TestClient) -> None:
    parts = {"strategy": {"ep_size": 2}, "training": {"global_batch_size": 4}, "scaling": {"num_workers": 2}}
    job_id = client.post("/jobs", content=spec_body(**parts)).json()["id"]
    answer = client.post(f"/jobs/{job_id}/resume", json={"scaling": {"num_workers": 1}})
    assert (answer.status_code, answer.json()["errors"]) == (
        422,
        [
            {
                "pointer": "/strategy/ep_size",
                "message": "ep_size=2 must divide the workers of a copy of the model, fsdp x tp = 1; a resume keeps "
                "the strategy: choose another number of workers, or clone the job with "
                f"trainshed clone {job_id} --set scaling.num_workers=1 --set strategy.ep_size=1",
            }
        ],
    )
    changed = {"scaling": {"num_workers": 1}, "strategy": {"ep_size": 1}}
    assert clone(client, job_id, overrides=changed).status_code == 201
