"""The reconciler on a scripted cluster: from the queue to the end of a job."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.domain.jobs.job import Job, JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.reason import Code
from service.ports import Node, SubmitRequest
from service.use_cases.jobs.reconcile import Reconciler
from tests.support.fakes.service import FakeService, started
from train_loop.run_dir import Fence, Outcome


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


def test_job_goes_from_queue_to_success(service: FakeService) -> None:
    job = started(service)
    assert service.cluster.launches == [
        SubmitRequest(f"{job.id}-1", job.id, "tiny", attempt=1, run_dir=service.get(job.id).run_dir, project="default")
    ]
    assert (service.run_dir(job.id).fence().attempt, service.run_dir(job.id).spec()) == (1, job.spec)
    service.end(job.id, Outcome(result="succeeded", step=20))
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.SUCCEEDED


def test_lost_driver_gets_a_second_attempt_after_a_delay(service: FakeService) -> None:
    job = started(service)
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.FAILED
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.RECOVERING
    assert len(service.cluster.launches) == 1
    service.clock.now += 10
    service.reconciler().run_once()
    assert [launch.submission_id for launch in service.cluster.launches] == [f"{job.id}-1", f"{job.id}-2"]
    assert service.run_dir(job.id).fence() == Fence(2)
    service.event(job.id, "training_started", attempt=2, steps=20, replayed=3)
    service.cluster.submissions[f"{job.id}-2"] = SubmissionStatus.RUNNING
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.RUNNING


def test_draining_host_gets_no_new_job(service: FakeService) -> None:
    service.cluster.total, service.cluster.nodes_total = {"CPU": 6.0}, ({"CPU": 3.0}, {"CPU": 3.0})
    service.cluster.known_nodes = [
        Node(f"id-{host}", host, "10.0.0.1", total={"CPU": 3.0}, started_at=1.0) for host in ("node2", "node3")
    ]
    first, reconciler = started(service), service.reconciler()
    workers = [{"rank": rank, "host": "node2"} for rank in (0, 1)]
    service.event(first.id, "training_started", workers=workers)
    service.event(first.id, "preemption_notice", ranks=[0, 1], deadline=None)
    reconciler.run_once()
    second = service.submit()
    reconciler.run_once()
    assert service.get(second.id).state is JobState.QUEUED
    # A newer node on the same host is not the draining node.
    service.cluster.known_nodes = [replace(node, started_at=9e9) for node in service.cluster.known_nodes]
    reconciler.run_once()
    assert service.get(second.id).state is JobState.STARTING


def test_job_that_raises_does_not_block_other_jobs(service: FakeService) -> None:
    stuck = service.submit()
    service.reconciler().run_once()
    service.run_dir(stuck.id).attempt(1).events.mkdir()
    other = service.submit()
    service.cluster.total = {"CPU": 99.0}
    service.reconciler().run_once()
    assert service.get(other.id).state is JobState.STARTING


def running(service: FakeService, **parts: Any) -> Job:
    """Submit a job and run the reconciler until it trains."""
    job = service.submit(**parts)
    service.reconciler().run_once()
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    service.event(job.id, "training_started", steps=20, replayed=0)
    service.reconciler().run_once()
    return job


@pytest.mark.parametrize(("project", "whom"), [("default", "job-0002"), ("other", "a job of another project")])
def test_preempted_job_names_only_jobs_of_its_project(service: FakeService, project: str, whom: str) -> None:
    service.cluster.total = {"CPU": 4.0}
    low = running(service)
    service.submit(priority=5, project=project)
    service.reconciler().run_once()
    reason = service.get(low.id).reason
    assert reason is not None
    assert reason.message == f"preempted by {whom}; resumes once there is capacity"


def test_higher_priority_job_preempts_a_lower_one_that_restarts_afterwards(service: FakeService) -> None:
    service.cluster.total = {"CPU": 4.0}
    low = running(service)
    high = service.submit(priority=5)
    service.reconciler().run_once()
    assert service.get(low.id).state is JobState.PAUSING
    assert "preempting job-0001 of lower priority" in service.queue.admission.waits[high.id].message
    service.reconciler().run_once()
    stop = service.run_dir(low.id).stop(attempt=1)
    assert stop is not None
    assert (stop.mode, stop.checkpoint) == ("pause", True)
    service.end(low.id, Outcome(result="paused", step=7))
    service.cluster.submissions[f"{low.id}-1"] = SubmissionStatus.SUCCEEDED
    service.reconciler().run_once()
    assert [service.get(job.id).state for job in (low, high)] == [JobState.PAUSED, JobState.STARTING]
    service.end(high.id, Outcome(result="succeeded"))
    service.reconciler().run_once()
    assert service.get(low.id).state is JobState.STARTING
    assert service.cluster.launches[-1].submission_id == f"{low.id}-2"


def run_passes(service: FakeService, reconciler: Reconciler, *, seconds: int) -> None:
    """Run one pass every ten seconds for `seconds` seconds."""
    for _ in range(0, seconds, 10):
        service.clock.now += 10
        reconciler.run_once()


def test_hung_attempt_is_replaced_and_writing_attempt_is_not(service: FakeService) -> None:
    job, reconciler = running(service, failure={"hang_timeout_seconds": 100}), service.reconciler()
    for step in range(1, 4):
        service.metric(job.id, step=step)
        run_passes(service, reconciler, seconds=150)
    assert service.get(job.id).state is JobState.RUNNING
    # An hour of machine sleep does not count as a hang.
    service.metric(job.id, step=4)
    reconciler.run_once()
    service.clock.now += 3600
    reconciler.run_once()
    run_passes(service, reconciler, seconds=90)
    assert service.get(job.id).state is JobState.RUNNING
    run_passes(service, reconciler, seconds=20)
    recovering = service.get(job.id)
    assert (recovering.state, recovering.reason and recovering.reason.code) == (JobState.RECOVERING, Code.HUNG)
    assert service.cluster.submissions[f"{job.id}-1"] is SubmissionStatus.STOPPED
    service.clock.now += 10
    reconciler.run_once()
    assert service.cluster.launches[-1].submission_id == f"{job.id}-2"


def test_attempt_whose_workers_hang_before_training_is_replaced(service: FakeService) -> None:
    job, reconciler = service.submit(failure={"hang_timeout_seconds": 100}), service.reconciler()
    reconciler.run_once()
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    # Data may take long to prepare.
    run_passes(service, reconciler, seconds=1000)
    service.event(job.id, "workers_ready", world=2)
    run_passes(service, reconciler, seconds=160)
    assert service.get(job.id).state is JobState.STARTING
    run_passes(service, reconciler, seconds=20)
    reason = service.get(job.id).reason
    assert reason is not None
    assert reason.code is Code.HUNG
    assert service.cluster.submissions[f"{job.id}-1"] is SubmissionStatus.STOPPED


def test_long_pass_is_followed_by_a_longer_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler = FakeService(tmp_path).reconciler()

    def busy(self: Reconciler, stopped: threading.Event) -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    rests = list[float]()

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout or 0.0)
            self.set()
            return True

    monkeypatch.setattr(Reconciler, "run_once", busy)
    stopped = Stopped()
    reconciler.run(stopped, interval=0.5)
    assert rests[0] >= 9 * 0.2
    monkeypatch.setattr(Reconciler, "run_once", lambda self, stopped: None)
    stopped.clear()
    reconciler.run(stopped, interval=0.5)
    assert rests[1] == 0.5
