"""The reconciler and stops of jobs: cancel, pause, and save at shutdown of the service."""

import threading
import time
from pathlib import Path

import pytest

from service.domain.access.roles import OPERATOR
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from tests.support.fakes.service import FakeService, started
from tests.support.waiting import wait_for
from train_loop.liveness.leave import ask_to_leave
from train_loop.run_dir import Outcome


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


def test_stop_jobs_saves_running_jobs_before_the_cluster_ends(service: FakeService) -> None:
    job, waiting = started(service), service.submit()
    ending = threading.Thread(target=service.reconciler().stop_jobs, kwargs={"seconds": 30.0})
    ending.start()
    stop = wait_for(lambda: service.run_dir(job.id).stop(attempt=1), "the request to stop")
    assert (stop.mode, stop.checkpoint, ending.is_alive()) == ("pause", True, True)
    service.end(job.id, Outcome(result="paused", step=7))
    ending.join(timeout=20)
    assert not ending.is_alive()
    found = service.get(job.id)
    assert (found.state, found.attempts[-1].result, found.failures) == (JobState.QUEUED, "service_stopped", ())
    assert service.get(waiting.id).attempts == ()
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.SUCCEEDED
    service.reconciler().run_once()
    assert f"{job.id}-2" in [launch.submission_id for launch in service.cluster.launches]


def test_stop_jobs_waits_at_most_its_timeout(service: FakeService) -> None:
    job, begun = started(service), time.monotonic()
    service.reconciler().stop_jobs(seconds=0.5)
    assert time.monotonic() - begun < 10
    assert service.get(job.id).state is JobState.PAUSING


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RECOVERING])
@pytest.mark.parametrize("ends", [JobState.CANCELLED, JobState.PAUSED])
def test_stop_of_a_hanging_driver_without_workers_is_forced_after_five_seconds(
    service: FakeService, state: JobState, ends: JobState
) -> None:
    if state is JobState.STARTING:
        job = service.submit()
        service.reconciler().run_once()
        service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    else:
        job = started(service)
        service.event(job.id, "workers_lost", ranks=[1], error="host node3 was lost")
    service.reconciler().run_once()
    assert service.get(job.id).state is state
    if ends is JobState.CANCELLED:
        service.jobs.cancel(OPERATOR, job.id, grace_seconds=60, checkpoint=True)
    else:
        service.jobs.pause(OPERATOR, job.id, grace_seconds=60)
    service.event(job.id, "stopping", mode="pause", waits_for="the end of its driver")
    service.reconciler().run_once()
    service.reconciler().run_once()
    assert service.cluster.submissions[f"{job.id}-1"] is SubmissionStatus.RUNNING
    reason = service.get(job.id).reason
    assert reason is not None
    assert "; waits for the end of its driver since " in reason.message
    service.clock.now += 5
    service.reconciler().run_once()
    service.reconciler().run_once()
    assert service.cluster.submissions[f"{job.id}-1"] is SubmissionStatus.STOPPED
    assert service.get(job.id).state is ends
    # A worker group that starts at this moment finds the stop request, and the fence rejects its commits.
    stop = service.run_dir(job.id).stop(attempt=1)
    assert stop is not None
    assert service.run_dir(job.id).fence().attempt == 2


def test_cancel_requests_stop_and_finishes_with_the_outcome(service: FakeService) -> None:
    job = started(service)
    service.jobs.cancel(OPERATOR, job.id, grace_seconds=5, checkpoint=True)
    service.reconciler().run_once()
    stop = service.run_dir(job.id).stop()
    assert stop is not None
    assert (stop.mode, stop.checkpoint, stop.deadline) == ("cancel", True, service.clock.now + 5)
    service.end(job.id, Outcome(result="cancelled", step=7))
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.CANCELLED


def test_cancel_stops_driver_after_grace_seconds(service: FakeService) -> None:
    job = started(service)
    service.jobs.cancel(OPERATOR, job.id, grace_seconds=5, checkpoint=True)
    service.reconciler().run_once()
    service.clock.now += 6
    service.reconciler().run_once()
    service.reconciler().run_once()
    assert service.cluster.submissions[f"{job.id}-1"] is SubmissionStatus.STOPPED
    assert service.get(job.id).state is JobState.CANCELLED


def test_job_cancelled_while_queued_is_never_submitted(service: FakeService) -> None:
    job = service.submit()
    service.jobs.cancel(OPERATOR, job.id, grace_seconds=5, checkpoint=True)
    service.reconciler().run_once()
    assert (service.get(job.id).state, service.cluster.launches) == (JobState.CANCELLED, [])


def test_driver_that_ends_while_it_disconnects_has_the_outcome_of_its_last_event(service: FakeService) -> None:
    job, notice = started(service), "its driver was asked to end (SIGTERM), as when its host is shut down"
    ask_to_leave(service.run_dir(job.id), 1, reason=notice)
    service.event(job.id, "finished", result="paused", step=7)
    service.reconciler().run_once()
    assert service.get(job.id).attempts[0].result is None, "its workers may still run"
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.FAILED
    service.reconciler().run_once()
    found = service.get(job.id).attempts[0]
    assert found.reason is not None
    assert (found.result, found.reason.message) == ("moved", f"{notice}; there is no checkpoint")


def test_outcome_counts_more_than_the_last_event(service: FakeService) -> None:
    job = started(service)
    service.event(job.id, "finished", result="failed", reason="the storage failed", retryable=True)
    service.end(job.id, Outcome(result="succeeded", step=20))
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.SUCCEEDED
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.SUCCEEDED
