"""API answers while the object storage of run directories returns errors or hangs."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from service.adapters.storage.roots import StorageRoots
from service.adapters.storage.run_dirs import LocalRunDirs
from service.adapters.storage.run_dirs_with_timeouts import GuardedRunDirs
from service.adapters.storage.timeouts import StorageGuard
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from tests.support.fakes.service import KEY, Clock, FakeService
from tests.support.servers.s3 import S3Server
from tests.support.servers.serving import serving
from tests.support.servers.storage import bucket_of_runs
from tests.support.waiting import wait_for
from train_loop.run_dir import JsonLines, Outcome
from trainshed import Client


@dataclass(frozen=True)
class Bucket:
    """A separate storage root for each test, used instead of a folder."""

    name: str

    def as_uri(self) -> str:
        return f"s3://runs/{self.name}"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with bucket_of_runs() as server:
        yield server


@pytest.fixture
def service(s3: S3Server, tmp_path: Path) -> FakeService:
    clock, roots = Clock(), StorageRoots()
    run_dirs = GuardedRunDirs(LocalRunDirs(roots, clock=clock), StorageGuard(roots.check, clock=clock))
    return FakeService(cast("Path", Bucket(tmp_path.name)), clock=clock, run_dirs=run_dirs)


@pytest.fixture
def job_id(service: FakeService) -> str:
    """Start a job and train seven steps."""
    job = service.submit()
    service.reconciler().run_once()
    service.cluster.submissions[service.get(job.id).attempts[-1].submission_id] = SubmissionStatus.RUNNING
    events = JsonLines(service.run_dir(job.id).attempt(1).events, attempt=1)
    events.append(event="workers_ready", world=2)
    events.append(event="training_started", steps=20)
    events.flush()
    _train(service, job.id, 7)
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.RUNNING
    return job.id


def _train(service: FakeService, job_id: str, *steps: int) -> None:
    lines = JsonLines(service.run_dir(job_id).attempt(1).metrics, attempt=1)
    for step in steps:
        lines.append(step=step, loss=2.5)
    lines.flush()


@contextmanager
def _frozen(s3: S3Server) -> Iterator[None]:
    assert s3._process is not None
    s3._process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        s3._process.send_signal(signal.SIGCONT)


def _outage(s3: S3Server, fault: str) -> AbstractContextManager[None]:
    return s3.refuse() if fault == "refuses" else _frozen(s3)


@pytest.mark.parametrize("fault", ["refuses", "hangs"])
@pytest.mark.slow
def test_job_is_answered_with_its_age_and_its_files_return_503(
    service: FakeService, s3: S3Server, job_id: str, fault: str
) -> None:
    client = service.client()
    assert client.get(f"/jobs/{job_id}").json()["progress"]["step"] == 7
    with _outage(s3, fault):
        began = time.monotonic()
        service.clock.now += 40.0
        found = client.get(f"/jobs/{job_id}").json()
        assert (found["progress"]["step"], found["reason"]["code"]) == (7, "storage_unavailable")
        assert found["progress"]["age_seconds"] == 40.0
        for path in ("events", "metrics", "logs", "checkpoints"):
            answer = client.get(f"/jobs/{job_id}/{path}")
            assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
            assert answer.headers["retry-after"] == "5"
        # Each of the five calls takes at most two seconds for a read and two for the check of the root.
        assert time.monotonic() - began < 5 * 4
    wait_for(lambda: client.get(f"/jobs/{job_id}/metrics").status_code == 200, "an answer")


def test_stream_stays_open_during_storage_errors_and_misses_nothing(
    service: FakeService, s3: S3Server, job_id: str
) -> None:
    steps = list[int]()

    def follow(url: str) -> None:
        with Client(url, KEY) as client:
            steps.extend(int(cast("int", line["step"])) for line in client.api.follow_metrics(job_id))

    with serving(service.app()) as port:
        thread = threading.Thread(target=follow, args=(f"http://127.0.0.1:{port}",))
        thread.start()
        wait_for(lambda: 7 in steps or None, "the first line")
        with s3.refuse():
            time.sleep(1.5)
        _train(service, job_id, 8, 9, 10)
        service.end(job_id, Outcome(result="succeeded", step=10))
        service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.SUCCEEDED
        service.reconciler().run_once()
        thread.join(20)
    assert steps == [7, 8, 9, 10]
