"""Inference jobs over HTTP: the service treats them as jobs of any kind."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from tests.support.builders.specs import infer_spec
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService
from train_loop.run_dir import Outcome
from train_loop.spec import InferJobSpec


def submit(client: TestClient, **parts: dict[str, object]) -> str:
    """Submit an inference job, and return its id."""
    answer = client.post("/jobs", content=json.dumps(infer_spec(**parts)))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_inference_job_runs_and_its_progress_counts_rows(client: TestClient, service: FakeService) -> None:
    job_id = submit(client, infer={"output": "perplexity"})
    service.reconciler().run_once()
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    assert isinstance(service.run_dir(job_id).spec(), InferJobSpec)
    service.event(job_id, "work_started", steps=23, resumed_from=0, replayed=0, workers=[])
    service.metric(job_id, step=8, step_seconds=0.5)
    service.run_dir(job_id).results.commit(0, b"rows")
    service.reconciler().run_once()
    job = client.get(f"/jobs/{job_id}").json()
    assert (job["state"], job["spec"]["kind"], job["spec"]["infer"]["output"]) == ("RUNNING", "infer", "perplexity")
    assert job["progress"] | {"step": 8, "of": 23, "unit": "row", "eta_seconds": 7.5} == job["progress"]
    service.event(job_id, "work_ended", result="succeeded", step=23)
    service.end(job_id, Outcome(result="succeeded", step=23))
    service.reconciler().run_once()
    ended = service.get(job_id)
    assert (ended.state, ended.attempts[0].step) == (JobState.SUCCEEDED, 1), "one shard is committed"


def test_plan_of_an_inference_job_has_no_memory_of_training(client: TestClient) -> None:
    plan = client.post("/jobs/plan", content=json.dumps(infer_spec(model={"dtype": "bf16"}))).json()
    sizes = {term["name"]: term["bytes"] for term in plan["memory"]["terms"]}
    assert all(sizes[name] == 0 for name in ("optimizer", "gradients", "checkpoint_staging", "ema"))
    assert sizes["parameters"] == 2 * plan["parameters"], "weights are held in bf16"
    assert (plan["micro_batch_size"], plan["checkpoint_bytes"]) == (4, 0)


def test_inference_job_is_resized_and_cloned_from_scratch(client: TestClient, service: FakeService) -> None:
    job_id = submit(client)
    assert client.post(f"/jobs/{job_id}/pause", json={}).status_code == 200
    service.reconciler().run_once()
    resized = client.post(f"/jobs/{job_id}/resume", json={"scaling": {"num_workers": 2}})
    assert (resized.status_code, resized.json()["scaling"]["num_workers"]) == (200, 2)
    clone = client.post(f"/jobs/{job_id}/clone", json={"overrides": {"infer": {"batch_size": 8}}})
    assert (clone.status_code, clone.json()["spec"]["infer"]["batch_size"]) == (201, 8)
    refused = client.post(f"/jobs/{job_id}/clone", json={"overrides": {"training": {"max_steps": 3}}})
    assert [one["pointer"] for one in refused.json()["errors"]] == ["/training"]


def test_generation_is_planned_with_its_cache_and_refused_where_it_cannot_be(client: TestClient) -> None:
    generation: dict[str, object] = {"max_new_tokens": 16, "temperature": 0.5, "stop_tokens": [2]}
    raw = infer_spec(infer={"output": "generate", "generation": generation})
    plan = client.post("/jobs/plan", content=json.dumps(raw)).json()
    assert "kv_cache" in {term["name"] for term in plan["memory"]["terms"]}
    assert client.post("/jobs", content=json.dumps(raw)).json()["spec"]["infer"]["generation"]["stop_tokens"] == [2]
    for field, value, pointer in (
        ("stop_tokens", [10**6], "/infer/generation/stop_tokens"),
        ("top_p", 0, "/infer/generation/top_p"),
        ("beams", 4, "/infer/generation/beams"),
    ):
        raw["infer"]["generation"] = generation | {field: value}
        answer = client.post("/jobs", content=json.dumps(raw))
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


@pytest.mark.parametrize("option", ["sentiment", "tokens"])
def test_output_that_does_not_exist_is_refused_at_its_place(client: TestClient, option: str) -> None:
    answer = client.post("/jobs", content=json.dumps(infer_spec(infer={"output": option})))
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/infer/output")


def test_results_command_prints_committed_rows(home: Path, client: TestClient, service: FakeService) -> None:
    job_id = submit(client)
    service.reconciler().run_once()
    for number in range(2):
        content = io.BytesIO()
        pq.write_table(pa.table({"row": [2 * number, 2 * number + 1], "perplexity": [1.5, None]}), content)
        service.run_dir(job_id).results.commit(number, content.getvalue())
    printed = [json.loads(line) for line in run("results", job_id, "--limit", "3").stdout.splitlines()]
    assert printed == [{"row": 0, "perplexity": 1.5}, {"row": 1, "perplexity": None}, {"row": 2, "perplexity": 1.5}]
    run("submit", str(home / "spec.json"))
    assert "kind: train, which has no results" in run("results", "job-0002").stderr
