"""API and reconciler while the storage of run directories is unavailable."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.adapters.storage import timeouts
from service.adapters.storage.roots import StorageRoots
from service.adapters.storage.run_dirs import LocalRunDirs
from service.adapters.storage.run_dirs_with_timeouts import GuardedRunDirs
from service.adapters.storage.timeouts import StorageGuard
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.reason import Code
from tests.support.fakes.service import Clock, FakeService
from train_loop.run_dir import forget_expected


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    monkeypatch.setattr(timeouts, "_RETRY_SECONDS", 0.0)
    clock, root = Clock(), tmp_path / "storage"
    roots = StorageRoots()
    run_dirs = GuardedRunDirs(LocalRunDirs(roots, clock=clock), StorageGuard(roots.check, clock=clock))
    yield FakeService(root, clock=clock, run_dirs=run_dirs)
    forget_expected(root)


@pytest.fixture
def job_id(service: FakeService) -> str:
    """Start a job and train seven steps."""
    job = service.submit()
    service.reconciler().run_once()
    service.cluster.submissions[service.get(job.id).attempts[-1].submission_id] = SubmissionStatus.RUNNING
    service.event(job.id, "workers_ready", world=2)
    service.event(job.id, "training_started", steps=20)
    service.metric(job.id, step=7, loss=2.5)
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.RUNNING
    return job.id


def unmount(service: FakeService) -> None:
    service.root.rename(service.root.with_name("away"))
    service.root.mkdir()


def mount(service: FakeService) -> None:
    service.root.rmdir()
    service.root.with_name("away").rename(service.root)


def test_job_is_answered_with_the_age_of_its_data(service: FakeService, job_id: str) -> None:
    client = service.client()
    before = client.get(f"/jobs/{job_id}").json()
    assert (before["progress"]["step"], before["progress"]["age_seconds"]) == (7, 0.0)
    unmount(service)
    service.clock.now += 40.0
    for found in (client.get(f"/jobs/{job_id}").json(), client.get("/jobs").json()["data"][0]):
        assert (found["progress"]["step"], found["progress"]["age_seconds"]) == (7, 40.0)
        assert found["progress"]["as_of"] == before["progress"]["as_of"]
        assert found["reason"]["code"] == found["progress"]["waits_for"]["code"] == "storage_unavailable"
        assert str(service.root) in found["reason"]["message"]
    mount(service)
    after = client.get(f"/jobs/{job_id}").json()
    assert (after["reason"], after["progress"]["age_seconds"]) == (None, 0.0)


@pytest.mark.parametrize("path", ["events", "metrics", "logs", "checkpoints"])
def test_run_endpoints_answer_503_with_retry_after(service: FakeService, job_id: str, path: str) -> None:
    unmount(service)
    answer = service.client().get(f"/jobs/{job_id}/{path}")
    assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
    assert answer.headers["retry-after"] == "5"
    assert str(service.root) in answer.json()["detail"]
    assert list(service.root.iterdir()) == []


def test_reconciler_reports_the_outage_once_and_clears_it_afterwards(service: FakeService, job_id: str) -> None:
    unmount(service)
    reconciler = service.reconciler()
    with capture_logs() as logs:
        for _ in range(5):
            reconciler.run_once()
    job = service.get(job_id)
    assert (job.state, job.reason and job.reason.code) == (JobState.RUNNING, Code.STORAGE_UNAVAILABLE)
    assert [entry["event"] for entry in logs] == ["storage_unavailable", "job_cannot_move"]
    mount(service)
    reconciler.run_once()
    assert (service.get(job_id).state, service.get(job_id).reason) == (JobState.RUNNING, None)
    assert len(service.get(job_id).attempts) == 1


def test_job_is_not_prepared_at_an_empty_mount_point(service: FakeService, job_id: str) -> None:
    unmount(service)
    other = service.submit()
    service.reconciler().run_once()
    job = service.get(other.id)
    assert (job.state, job.reason and job.reason.code) == (JobState.STARTING, Code.STORAGE_UNAVAILABLE)
    assert list(service.root.iterdir()) == []
    mount(service)
    service.reconciler().run_once()
    assert service.get(other.id).attempts[-1].submitted_at is not None
