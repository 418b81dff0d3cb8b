"""Checkpoints over HTTP: list, verify, digest, pin and export."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from service.adapters.helper_processes.checkpoints import HelperTools
from service.errors import Busy, VerifyFailed
from service.ports import Cancellation, Digests
from tests.support.builders.checkpoints import checkpoint, edit
from tests.support.builders.tensors import tensor_checkpoint
from tests.support.fakes.service import FakeService, spec_body
from tests.support.turns import turns
from tests.support.waiting import wait_for
from train_loop.checkpoint.digest import digest_checkpoint
from train_loop.checkpoint.retention import retire_others
from train_loop.checkpoint.store.open import open_store
from train_loop.run_dir import ExportStatus, ExportWish, Fence
from train_loop.spec import CheckpointSpec

in_turn = turns(["failed export", "bad digests"], 1)
"""Each starts processes that import torch."""


@pytest.fixture
def job_id(client: TestClient) -> str:
    return str(client.post("/jobs", content=spec_body()).json()["id"])


@pytest.fixture
def url(service: FakeService, job_id: str) -> str:
    """Return the path of the checkpoints of a job that has two."""
    job = service.get(job_id)
    service.run_dirs.prepare(job.run_dir, job.spec, job.size, attempt=1)
    for step in (10, 20):
        checkpoint(service.run_dir(job_id), step, weights=b"1234567")
    return f"/jobs/{job_id}/checkpoints"


def test_checkpoint_list_shows_fields_of_the_manifests(client: TestClient, url: str) -> None:
    expected: dict[str, Any] = {"bytes": 7, "time": "1970-01-01T00:00:00.000+00:00", "attempt": 1, "world": 1}
    expected |= {"mesh": {"fsdp": 1}, "metrics": {}, "pinned": False}
    assert client.get(url).json() == {
        "data": [{"step": 10, "tokens": 10} | expected, {"step": 20, "tokens": 20} | expected]
    }


def test_checkpoint_of_a_newer_version_is_named(
    client: TestClient, service: FakeService, job_id: str, url: str
) -> None:
    edit(service.run_dir(job_id), 20, format=9)
    clone = client.post(f"/jobs/{job_id}/clone", json={"from_checkpoint": 20})
    for answer in (client.get(url), clone):
        assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint_unknown")
        assert answer.json()["detail"].startswith(
            "the checkpoint of step 20 has format 9, but this version of Trainshed"
        )
    # The job itself still comes to its end.
    assert service.run_dirs.committed(service.get(job_id).run_dir) == 20


def test_verify_reads_the_whole_checkpoint(client: TestClient, service: FakeService, job_id: str, url: str) -> None:
    assert client.post(f"{url}/20/verify").json() == {"step": 20, "ok": True, "faults": []}
    (service.run_dir(job_id).checkpoint(20) / "weights").write_bytes(b"1234568")
    fault = "weights has another SHA-256 than when it was committed"
    assert client.post(f"{url}/20/verify").json() == {"step": 20, "ok": False, "faults": [fault]}


def test_digests_are_those_of_the_tensors(client: TestClient, service: FakeService, job_id: str, url: str) -> None:
    values = {"model": {"w": torch.ones(3, 2)}, "optimizer": {"w": torch.tensor(1.0)}}
    folder = tensor_checkpoint(service.run_dir(job_id), 30, values)
    answer = client.get(f"{url}/30/digests")
    found = digest_checkpoint(folder)
    assert answer.json() == {
        "step": 30,
        "sha256": found.sha256,
        "tensors": {name: one._asdict() for name, one in found.tensors.items()},
    }
    assert answer.json()["tensors"]["model.w"]["shape"] == [3, 2]


@in_turn("bad digests")
def test_digests_of_a_damaged_checkpoint_are_a_problem(
    client: TestClient, service: FakeService, job_id: str, url: str
) -> None:
    (service.run_dir(job_id).checkpoint(20) / "weights").write_bytes(b"1234568")
    answer = client.get(f"{url}/20/digests")
    assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint_damaged")
    assert answer.json()["detail"] == (
        "the checkpoint of step 20 of job-0001 is damaged: weights has another SHA-256 than when it was committed; "
        "choose another step of GET /jobs/job-0001/checkpoints"
    )


@in_turn("bad digests")
def test_digests_of_an_unreadable_checkpoint_are_a_problem(client: TestClient, url: str) -> None:
    answer = client.get(f"{url}/20/digests")
    assert (answer.status_code, answer.json()["code"]) == (503, "verify_failed")
    assert ".metadata" in answer.json()["detail"]


def test_checkpoint_deleted_before_its_digests_are_computed_returns_404(
    client: TestClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HelperTools, "digests", lambda *_: None)
    assert client.get(f"{url}/20/digests").json()["code"] == "checkpoint_not_found"


def test_digests_are_computed_one_at_a_time(client: TestClient, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = threading.Semaphore(1), list[bool]()

    def compute(*_: object) -> Digests:
        alone = running.acquire(blocking=False)
        most.append(alone)
        time.sleep(0.02)
        if alone:
            running.release()
        return Digests((), "0", {})

    monkeypatch.setattr(HelperTools, "digests", compute)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: client.get(f"{url}/20/digests").status_code, range(8)))
    assert (answers, most) == ([200] * 8, [True] * 8)


def test_digests_that_take_too_long_are_a_problem(service: FakeService, url: str, job_id: str) -> None:
    with pytest.raises(VerifyFailed, match=r"took over 0\.01 s; check that the storage answers"):
        HelperTools(timeout=0.01).digests(service.get(job_id).run_dir, 20, Cancellation())


def test_pinned_checkpoint_is_kept_and_shown(client: TestClient, service: FakeService, job_id: str, url: str) -> None:
    run_dir = service.run_dir(job_id)
    for _ in range(2):
        answer = client.post(f"{url}/10/pin")
        assert (answer.status_code, answer.json()["pinned"]) == (200, True)
    retire_others(run_dir, open_store(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
    assert [c["step"] for c in client.get(url).json()["data"]] == [10, 20]
    assert client.delete(f"{url}/10/pin").json()["pinned"] is False
    retire_others(run_dir, open_store(run_dir, Fence(1)), CheckpointSpec(keep_last=1))
    assert [c["step"] for c in client.get(url).json()["data"]] == [20]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "verify"), ("GET", "digests"), ("POST", "pin"), ("DELETE", "pin"), ("POST", "export")],
)
def test_call_for_missing_checkpoint_returns_404(client: TestClient, url: str, method: str, path: str) -> None:
    answer = client.request(method, f"{url}/30/{path}")
    assert (answer.status_code, answer.json()["code"]) == (404, "checkpoint_not_found")
    assert "checkpoint of step 30 of job-0001 not found, or deleted" in answer.json()["detail"]
    assert "GET /jobs/job-0001/checkpoints" in answer.json()["detail"]
    assert client.request(method, f"/jobs/job-9/checkpoints/10/{path}").json()["code"] == "job_not_found"


@in_turn("failed export")
@pytest.mark.slow
def test_failed_export_reports_its_reason_and_can_be_retried(client: TestClient, url: str) -> None:
    """Export a fake checkpoint; the tests of the export cover real ones."""
    answer = client.post(f"{url}/20/export", json={"dtype": "bf16"})
    assert answer.status_code == 202
    assert (answer.json()["state"], answer.json()["path"].rpartition("/")[2]) == ("running", "step-00000020-model-bf16")

    def ended() -> dict[str, Any] | None:
        status: dict[str, Any] = client.get(f"{url}/20/export", params={"dtype": "bf16"}).json()
        return None if status["state"] == "running" else status

    failed = wait_for(ended, "the end of the export")
    assert (failed["state"], ".metadata" in failed["reason"]) == ("failed", True)
    assert client.post(f"{url}/20/export", json={"dtype": "bf16"}).json()["state"] == "running"
    wait_for(ended, "the end of the second export")


def test_export_is_made_once(client: TestClient, service: FakeService, job_id: str, url: str) -> None:
    wish = ExportWish(dtype="fp32")
    exports = service.run_dir(job_id).exports
    exports.write(ExportStatus(step=20, wish=wish, state="running", progress=0.5, time=service.clock()))
    assert client.post(f"{url}/20/export").json()["progress"] == 0.5
    exports.folder(20, wish).mkdir()
    exports.write(ExportStatus(step=20, wish=wish, state="done", progress=1.0, time=service.clock()))
    done = client.post(f"{url}/20/export")
    assert (done.status_code, done.json()["state"]) == (200, "done")


def test_export_requested_again_keeps_the_result_of_a_killed_one(
    client: TestClient, service: FakeService, job_id: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HelperTools, "export", lambda *_: None)
    exports, wish = service.run_dir(job_id).exports, ExportWish(dtype="fp32")
    left = {"progress": 1.0, "difference": 0.25, "completed": 5.0}
    exports.write(ExportStatus(step=20, wish=wish, state="running", time=service.clock() - 120, **left))
    assert client.post(f"{url}/20/export").json()["state"] == "running"
    status = exports.status(20, wish, now=service.clock())
    assert status is not None
    assert (status.state, status.difference, status.completed) == ("running", 0.25, 5.0)


def test_export_without_a_free_slot_is_busy_and_does_not_run(
    client: TestClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_busy(*_: object) -> None:
        raise Busy("2 exports are running, the maximum; retry when one has finished")

    monkeypatch.setattr(HelperTools, "export", raise_busy)
    for _ in range(2):
        answer = client.post(f"{url}/20/export")
        assert (answer.status_code, answer.json()["code"], answer.headers["Retry-After"]) == (503, "busy", "5")
        assert client.get(f"{url}/20/export").json()["code"] == "export_not_found"


@pytest.mark.parametrize(
    ("body", "pointer", "message"),
    [
        ({"dtype": "int8"}, "/dtype", "Input should be 'bf16', 'fp16' or 'fp32'"),
        (
            {"weights": "ema"},
            "/weights",
            "the job has no EMA weights (training.ema_decay is not set); export its weights",
        ),
        ({"form": "merged"}, "/form", "the run trains no adapters (model.lora); export without form"),
        (
            {"include": "optimizer", "dtype": "bf16"},
            "/include",
            "dtype=bf16 rounds the weights to which the optimizer state belongs; choose fp32",
        ),
    ],
)
def test_invalid_export_options_are_rejected(
    client: TestClient, url: str, body: dict[str, str], pointer: str, message: str
) -> None:
    answer = client.post(f"{url}/20/export", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"pointer": pointer, "message": message}]


def test_export_that_was_not_requested_returns_404(client: TestClient, url: str) -> None:
    answer = client.get(f"{url}/20/export")
    assert (answer.status_code, answer.json()["code"]) == (404, "export_not_found")
