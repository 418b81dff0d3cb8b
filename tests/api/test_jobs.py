"""Submit, plan, list, get and cancel over HTTP."""

import threading
from datetime import UTC, datetime

import pytest
from fastapi.testclient import TestClient

from service.domain.jobs.observation import SubmissionStatus
from service.use_cases.jobs.first_view import FirstView
from tests.support.fakes.service import FakeService, spec_body
from train_loop.plan import Preview, SampleCount
from train_loop.run_dir import Outcome

YAML = """
name: tiny
model: {config: {model_type: qwen3, hidden_size: 64, num_attention_heads: 4}, dtype: fp32}
data: {train: {path: "stdlib://"}}
training: {learning_rate: 1e-3}
"""


def test_submit_returns_201_with_location_and_the_resolved_job(client: TestClient, service: FakeService) -> None:
    answer = client.post("/jobs", content=spec_body(labels={"team": "nlp"}, priority=3))
    job = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, "/jobs/job-0001")
    assert (job["id"], job["name"], job["project"], job["state"]) == ("job-0001", "tiny", "default", "QUEUED")
    assert (job["labels"], job["priority"], job["attempt"], job["attempts"]) == ({"team": "nlp"}, 3, 0, [])
    assert job["run_dir"] == f"{service.root.as_uri()}/default/job-0001"
    assert job["spec"]["training"]["optimizer"] == "adamw"
    assert (job["progress"]["step"], job["progress"]["of"], job["progress"]["percent"]) == (0, 20, 0.0)
    assert (job["reason"], job["lost_work"], job["restarts"]) == (None, {"steps": 0, "hours": 0.0}, 0)
    assert list(job["times"]) == ["QUEUED"]
    assert client.get("/jobs/job-0001").json() == job


def test_yaml_spec_is_accepted(client: TestClient) -> None:
    assert client.post("/jobs", content=YAML).json()["spec"]["training"]["learning_rate"] == 1e-3


def test_plan_returns_mesh_memory_and_steps_and_stores_nothing(client: TestClient, service: FakeService) -> None:
    service.cluster.total = {"CPU": 16.0}
    strategy, scaling = {"fsdp_size": 4, "ulysses_size": 2}, {"num_workers": 8}
    plan = client.post("/jobs/plan", content=spec_body(strategy=strategy, scaling=scaling)).json()
    sizes = {"ddp": 2, "fsdp": 4, "sp": 2, "tp": 1, "ep": 1, "efsdp": 4}
    assert plan["mesh"] == sizes | {"shape": [2, 4], "names": ["ddp", "fsdp"]}
    assert (plan["world"], plan["data_parallel_size"], plan["global_batch_size"]) == (8, 4, 4)
    assert (plan["tokens_per_step"], plan["steps"]) == (512, 20)
    assert plan["memory"]["total_bytes"] == sum(term["bytes"] for term in plan["memory"]["terms"])
    assert plan["checkpoint_bytes"] == pytest.approx(12 * plan["parameters"], rel=0.001), "fp32 weights, two moments"
    assert client.get("/jobs").json()["data"] == []


def test_job_larger_than_the_cluster_stays_queued_with_a_reason(client: TestClient, service: FakeService) -> None:
    body = spec_body(scaling={"num_workers": 99})
    what, remedy = (
        "99 workers need 99 CPU (the cluster has 8)",
        "add nodes, or cancel and submit fewer or smaller workers",
    )
    warning = f"the job would stay QUEUED: {what}; {remedy}"
    assert client.post("/jobs/plan", content=body).json()["warnings"] == [warning]
    job_id = client.post("/jobs", content=body).json()["id"]
    service.reconciler().run_once()
    job = client.get(f"/jobs/{job_id}").json()
    assert (job["state"], job["reason"]) == (
        "QUEUED",
        {"code": "unschedulable", "message": what, "remedy": remedy},
    )
    assert (job["progress"]["waits_for"], job["progress"]["place"]) == (job["reason"], 1)


def test_list_pages_newest_first_and_filters(client: TestClient) -> None:
    for number in range(3):
        client.post("/jobs", content=spec_body(name=f"n{number}", labels={"team": "nlp" if number else "cv"}))
    first = client.get("/jobs", params={"limit": 2}).json()
    assert ([job["name"] for job in first["data"]], first["has_more"]) == (["n2", "n1"], True)
    second = client.get("/jobs", params={"limit": 2, "after": first["next"]}).json()
    assert ([job["name"] for job in second["data"]], second["has_more"], second["next"]) == (["n0"], False, None)

    def names(**params: str) -> list[str]:
        return [job["name"] for job in client.get("/jobs", params=params).json()["data"]]

    assert names(**{"label.team": "cv"}) == ["n0"]
    assert names(name="n1", project="default") == ["n1"]
    assert names(state="RUNNING") == []


def test_running_job_shows_progress_attempts_and_lost_work(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    service.reconciler().run_once()
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    service.event(job_id, "training_started", steps=20, replayed=0)
    service.event(job_id, "training_started", steps=20, replayed=2)
    service.metric(job_id, step=5, loss=2.5, tokens_per_second=64.0, mfu=0.4, step_seconds=2.0)
    service.reconciler().run_once()
    job = client.get(f"/jobs/{job_id}").json()
    assert (job["state"], job["attempt"], job["restarts"], job["lost_work"]["steps"]) == ("RUNNING", 1, 1, 2)
    assert job["attempts"][0]["submission_id"] == f"{job_id}-1"
    assert job["progress"].pop("as_of") is not None
    assert job["progress"].pop("age_seconds") == 0.0
    assert job["progress"] == {
        "step": 5,
        "of": 20,
        "unit": "step",
        "percent": 25.0,
        "eta_seconds": 30.0,
        "loss": 2.5,
        "tokens_per_second": 64.0,
        "mfu": 0.4,
        "place": None,
        "waits_for": None,
    }


def test_plan_counts_steps_of_epochs_and_rejects_a_longer_warmup(client: TestClient, service: FakeService) -> None:
    service.preflight.count = SampleCount(80, exact=True)
    training = {"learning_rate": 1e-3, "max_steps": None, "num_train_epochs": 2, "global_batch_size": 8}
    body = spec_body(training=training | {"warmup_steps": 19})
    assert client.post("/jobs/plan", content=body).json()["steps"] == 20
    for path in ("/jobs/plan", "/jobs"):
        answer = client.post(path, content=spec_body(training=training | {"warmup_steps": 20}))
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["pointer"] == "/training/warmup_steps"
        assert error["message"].startswith("warmup_steps=20 is not less than the 20 steps of the run")
    # The count is an upper bound: the plan knows the maximum number of steps, but not the exact number.
    service.preflight.count = SampleCount(80, exact=False)
    assert client.post("/jobs/plan", content=spec_body(training=training)).json()["steps"] is None
    assert client.post("/jobs/plan", content=spec_body(training=training | {"warmup_steps": 20})).status_code == 422


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan"])
@pytest.mark.parametrize(
    ("each", "message"), [({"TPU": 4}, "training on TPU is not supported"), ({"GPU": 0.5}, "GPU: 0.5 per worker")]
)
def test_worker_with_an_unusable_device_is_rejected(
    client: TestClient, path: str, each: dict[str, float], message: str
) -> None:
    answer = client.post(path, content=spec_body(scaling={"num_workers": 1, "resources_per_worker": each}))
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["pointer"] == "/scaling/resources_per_worker"
    assert error["message"].startswith(message)


def test_plan_and_job_warn_about_unrequested_gpus(client: TestClient, service: FakeService) -> None:
    service.cluster.total = {"CPU": 16.0, "GPU": 2.0}
    warning = "the job requests no GPU and trains on CPUs, but the cluster has 2 GPU"
    for path in ("/jobs/plan", "/jobs"):
        (message,) = client.post(path, content=spec_body()).json()["warnings"]
        assert message.startswith(warning)


def test_every_warning_of_the_plan_is_in_the_answer_to_a_submission(client: TestClient, service: FakeService) -> None:
    service.cluster.total = {"CPU": 16.0, "GPU": 2.0}
    service.preflight.preview = tuple(
        Preview(name, 1, 1, 0, 0, "drop", notes=(f"{name}: 1 row is bad",)) for name in "ab"
    )
    body = spec_body()
    planned = client.post("/jobs/plan", content=body).json()["warnings"]
    assert planned[1:] == ["a: 1 row is bad", "b: 1 row is bad"]
    for key in ("one", "two", "one"):
        answer = client.post("/jobs", content=body, headers={"Idempotency-Key": key})
        assert answer.json()["warnings"] == planned
    assert client.get(f"/jobs/{answer.json()['id']}").json()["warnings"] == []
    clone = client.post(f"/jobs/{answer.json()['id']}/clone", json={})
    assert clone.json()["warnings"] == planned


def test_hours_are_counted_by_day_and_kept_after_deletion(client: TestClient, service: FakeService) -> None:
    service.cluster.total = {"CPU": 16.0, "GPU": 2.0}
    service.clock.now = datetime(2026, 11, 21, 23, tzinfo=UTC).timestamp()
    scaling = {"num_workers": 2, "resources_per_worker": {"CPU": 3, "GPU": 1}}
    job_id = client.post("/jobs", content=spec_body(scaling=scaling)).json()["id"]
    service.reconciler().run_once()
    service.clock.now += 1.5 * 3600
    job = client.get(f"/jobs/{job_id}").json()
    assert (job["worker_hours"], job["cpu_hours"], job["gpu_hours"], job["goodput"]) == (3.0, 9.0, 3.0, 0.0)
    first = {"project": "default", "day": "2026-11-21", "worker_hours": 2.0, "cpu_hours": 6.0, "gpu_hours": 2.0}
    second = {"project": "default", "day": "2026-11-22", "worker_hours": 1.0, "cpu_hours": 3.0, "gpu_hours": 1.0}
    assert client.get("/usage").json() == {"data": [first, second]}
    assert client.get("/usage", params={"until": "2026-11-21"}).json() == {"data": [first]}
    assert client.get("/usage", params={"project": "other"}).json() == {"data": []}
    # The usage of a deleted job is kept.
    service.end(job_id, Outcome(result="succeeded", step=20))
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.SUCCEEDED
    service.reconciler().run_once()
    assert client.delete(f"/jobs/{job_id}").status_code == 204
    service.clock.now += 3600
    assert client.get("/usage").json() == {"data": [first, second]}
    assert client.get("/usage", params={"until": "2026-11-21"}).json() == {"data": [first]}
    assert client.get("/usage", params={"project": "other"}).json() == {"data": []}


def test_cancel_can_be_repeated(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    states = [client.post(f"/jobs/{job_id}/cancel", json={"grace_seconds": 5}).json()["state"] for _ in range(2)]
    service.reconciler().run_once()
    states.append(client.post(f"/jobs/{job_id}/cancel").json()["state"])
    assert states == ["CANCELLING", "CANCELLING", "CANCELLED"]


def test_second_cancel_can_only_shorten_the_grace(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    for grace in (50, 5, 500):
        client.post(f"/jobs/{job_id}/cancel", json={"grace_seconds": grace})
    stop_request = service.get(job_id).stop_request
    assert stop_request is not None
    assert stop_request.deadline == service.clock.now + 5


def test_job_is_paused_resumed_at_another_size_and_deleted(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body(training={"global_batch_size": 4})).json()["id"]
    service.reconciler().run_once()
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    service.event(job_id, "training_started", steps=20, replayed=0)
    service.reconciler().run_once()
    assert client.post(f"/jobs/{job_id}/pause", json={"grace_seconds": 5}).json()["state"] == "PAUSING"
    service.reconciler().run_once()
    stop = service.run_dir(job_id).stop()
    assert stop is not None
    assert (stop.mode, stop.attempt, stop.deadline) == ("pause", 1, service.clock.now + 5)
    service.end(job_id, Outcome(result="paused", step=7))
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.SUCCEEDED
    service.reconciler().run_once()
    paused = client.get(f"/jobs/{job_id}").json()
    assert (paused["state"], paused["reason"]["code"], paused["attempts"][0]["result"]) == ("PAUSED", "user", "paused")
    assert client.delete(f"/jobs/{job_id}").status_code == 409
    resumed = client.post(f"/jobs/{job_id}/resume", json={"scaling": {"num_workers": 4}}).json()
    assert (resumed["state"], resumed["scaling"]["num_workers"]) == ("QUEUED", 4)
    service.reconciler().run_once()
    assert service.cluster.launches[-1].submission_id == f"{job_id}-2"
    run_dir = service.run_dir(job_id)
    assert run_dir.attempt(2).spec(run_dir.spec()).scaling.world == 4
    assert run_dir.stop(attempt=2) is None
    client.post(f"/jobs/{job_id}/cancel", json={"grace_seconds": 0})
    service.reconciler().run_once()
    service.reconciler().run_once()
    assert client.delete(f"/jobs/{job_id}").status_code == 204
    assert client.get(f"/jobs/{job_id}").status_code == 404
    assert run_dir.spec().name == "tiny"


def test_resize_that_would_change_a_step_is_rejected(client: TestClient) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    answer = client.post(f"/jobs/{job_id}/resume", json={"scaling": {"num_workers": 4}})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
    assert answer.json()["errors"] == [
        {
            "pointer": "/scaling/num_workers",
            "message": "num_workers=4 differs from 2 in the spec and would change the number of sequences per step; "
            "only a job whose spec sets training.global_batch_size can be resized",
        }
    ]


def test_finished_job_cannot_be_cancelled(client: TestClient, service: FakeService) -> None:
    job_id = client.post("/jobs", content=spec_body()).json()["id"]
    service.reconciler().run_once()
    service.end(job_id, Outcome(result="succeeded"))
    service.reconciler().run_once()
    answer = client.post(f"/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "illegal_state")
    assert answer.json()["detail"] == f"{job_id} is already SUCCEEDED and cannot be cancelled; nothing needs to be done"


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_key(service: FakeService, path: str) -> None:
    with service.client(authorization="") as client:
        assert client.get(path).status_code == 200


def test_service_that_has_not_listed_its_nodes_is_not_ready_and_refuses_only_what_needs_them(
    service: FakeService, client: TestClient
) -> None:
    first_view = client.app.state.jobs.first_view  # type: ignore[attr-defined] # an ASGI app to httpx
    first_view.pending, service.cluster.total = True, None
    on_nodes = spec_body(strategy={"fsdp_size": "node"})
    for path, body in (("/jobs", on_nodes), ("/jobs/plan", on_nodes)):
        answer = client.post(path, content=body)
        assert (answer.status_code, answer.json()["code"]) == (503, "cluster_starting")
        assert answer.headers["retry-after"] == "5"
    assert client.get("/readyz").json()["code"] == "cluster_starting"
    assert client.post("/jobs", content=spec_body()).status_code == 201
    first_view.wait(threading.Event(), known=service.cluster.capacity, seconds=0.0)
    assert client.get("/readyz").status_code == 200
    assert client.post("/jobs/plan", content=on_nodes).status_code == 422, "a cluster that is away is no reason to wait"


@pytest.mark.parametrize(("answers", "asked"), [([None, None, "nodes"], 3), (["nodes"], 1)])
def test_first_view_ends_with_the_first_list_of_nodes(answers: list[str | None], asked: int) -> None:
    view, left = FirstView(), iter(answers)
    view.wait(threading.Event(), known=lambda: next(left), seconds=60.0)
    assert (view.pending, list(left)) == (False, answers[asked:])


def test_first_view_ends_with_its_time_limit_and_with_the_service() -> None:
    ending = threading.Event()
    for seconds in (0.0, 0.3):
        view = FirstView()
        view.wait(ending, known=lambda: None, seconds=seconds)
        assert not view.pending
    ending.set()
    FirstView().wait(ending, known=lambda: None, seconds=60.0)


ELASTIC = {"training": {"global_batch_size": 8}, "scaling": {"num_workers": {"min": 1, "max": 6}}}


def test_plan_of_an_elastic_job_lists_its_sizes_and_plans_the_largest(client: TestClient) -> None:
    plan = client.post("/jobs/plan", content=spec_body(**ELASTIC)).json()
    assert (plan["sizes"], plan["world"], plan["gradient_accumulation_steps"]) == ([1, 2, 4], 4, 2)
    assert client.post("/jobs/plan", content=spec_body()).json()["sizes"] == []


def test_elastic_range_without_a_valid_size_is_rejected(client: TestClient) -> None:
    parts = ELASTIC | {"scaling": {"num_workers": {"min": 5, "max": 7}}}
    (error,) = client.post("/jobs", content=spec_body(**parts)).json()["errors"]
    assert error["pointer"] == "/training/global_batch_size"
    assert error["message"].startswith(
        "no number of workers from 5 to 7 fits the strategy and the batch size; with 7: global_batch_size=8 is not"
    )


def test_elastic_job_starts_at_the_size_that_fits_and_is_resized_by_its_user(
    client: TestClient, service: FakeService
) -> None:
    service.cluster.total = {"CPU": 4.0}
    job_id = client.post("/jobs", content=spec_body(**ELASTIC)).json()["id"]
    service.reconciler().run_once()
    job = client.get(f"/jobs/{job_id}").json()
    assert (job["state"], job["sizes"], job["scaling"]["num_workers"]) == ("STARTING", [1, 2, 4], 2)
    assert job["spec"]["scaling"]["num_workers"] == {"min": 1, "max": 6}
    assert service.run_dir(job_id).attempt(1).spec(service.run_dir(job_id).spec()).scaling.world == 2
    job = client.post(f"/jobs/{job_id}/resume", json={"scaling": {"num_workers": 1}}).json()
    assert (job["state"], job["reason"]["code"], job["sizes"]) == ("PAUSING", "resized", [])
    service.reconciler().run_once()
    stop = service.run_dir(job_id).stop()
    assert stop is not None
    assert (stop.mode, stop.attempt) == ("resize", 1)
    service.end(job_id, Outcome(result="resized"))
    reconciler = service.reconciler()
    for _ in range(2):
        reconciler.run_once()
    job = client.get(f"/jobs/{job_id}").json()
    assert [attempt["workers"] for attempt in job["attempts"]] == [2, 1]


def test_elastic_job_that_cannot_shrink_is_reported_at_submit(client: TestClient, service: FakeService) -> None:
    service.cluster.total, service.cluster.nodes_total = {"CPU": 4.0}, ({"CPU": 2.0}, {"CPU": 2.0})
    parts = ELASTIC | {"scaling": {"num_workers": {"min": 2, "max": 4}, "resources_per_worker": {"CPU": 0.75}}}
    plan, job = (client.post(path, content=spec_body(**parts)).json() for path in ("/jobs/plan", "/jobs"))
    (warning,) = [one for one in job["warnings"] if "shrink" in one]
    assert "2 x 0.75 CPU + 1 CPU for Ray Data > 2 CPU" in warning
    assert warning in plan["warnings"]
    assert client.get(f"/jobs/{job['id']}").json()["warnings"] == []


def test_plan_keeps_ulysses_groups_on_one_node(client: TestClient, service: FakeService) -> None:
    service.cluster.total, node = {"CPU": 9.0}, {"CPU": 3.0}
    service.cluster.nodes_total = (node, node, node)
    body = spec_body(scaling={"num_workers": 4}, strategy={"ulysses_size": 2, "fsdp_size": 2})
    plan = client.post("/jobs/plan", content=body).json()
    assert (plan["nodes"], plan["warnings"]) == ([[0, 1], [2, 3]], [])
    service.cluster.nodes_total = ()
    assert client.post("/jobs/plan", content=body).json()["nodes"] is None


def test_ulysses_groups_across_nodes_are_a_warning_in_plan_and_job(client: TestClient, service: FakeService) -> None:
    service.cluster.total, service.cluster.nodes_total = {"CPU": 7.0}, ({"CPU": 3.0}, {"CPU": 3.0}, {"CPU": 1.0})
    warning = (
        "1 of 3 Ulysses groups cross nodes, where their all-to-all is slow: nodes with places for 3 (x 2 nodes) + 1 "
        "workers hold 2 whole groups of ulysses_size=2; choose ulysses_size=1 or 4 workers, or add a node with "
        "places for 2 workers"
    )
    body = spec_body(scaling={"num_workers": 6}, strategy={"ulysses_size": 2, "sharding_strategy": "NO_SHARD"})
    assert client.post("/jobs/plan", content=body).json()["warnings"] == [warning]
    for _ in range(2):
        job = client.post("/jobs", content=body, headers={"Idempotency-Key": "one"}).json()
        assert job["warnings"] == [warning]
    assert client.get(f"/jobs/{job['id']}").json()["warnings"] == []


def test_worker_too_large_for_every_node_is_reported_and_not_started(client: TestClient, service: FakeService) -> None:
    service.cluster.total = {"CPU": 6.0}
    service.cluster.nodes_total = ({"CPU": 3.0}, {"CPU": 3.0})
    body = spec_body(scaling={"num_workers": 1, "resources_per_worker": {"CPU": 4}})
    message = "a worker needs 4 CPU, which no single node of the cluster has"
    remedy = "add larger nodes, or ask for less"
    plan = client.post("/jobs/plan", content=body).json()
    assert (plan["nodes"], plan["warnings"]) == (None, [f"the job would stay QUEUED: {message}; {remedy}"])
    job_id = client.post("/jobs", content=body).json()["id"]
    service.reconciler().run_once()
    waits = client.get(f"/jobs/{job_id}").json()["progress"]["waits_for"]
    assert waits == {"code": "unschedulable", "message": message, "remedy": remedy}
