"""The reconciler with a crash after each side effect, and beside users and other services."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.domain.access.roles import OPERATOR
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from service.ports import Lease, SubmitRequest
from tests.support.fakes.service import FakeService
from tests.support.fakes.stores import MemoryCluster
from train_loop.plan import Capacity


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


class CancelsDuringAdmission(MemoryCluster):
    """A cluster on which a user cancels the job during admission."""

    service: FakeService

    def capacity(self) -> Capacity | None:
        self.service.jobs.cancel(OPERATOR, "job-0001", grace_seconds=60, checkpoint=True)
        return super().capacity()


def test_cancel_during_admission_wins(service: FakeService) -> None:
    job, cluster = service.submit(), CancelsDuringAdmission()
    cluster.service = service
    service.reconciler(cluster=cluster).run_once()
    assert service.get(job.id).state is JobState.CANCELLING
    service.reconciler().run_once()
    assert (service.get(job.id).state, service.cluster.launches) == (JobState.CANCELLED, [])


class Crash(BaseException):
    """Simulated death of the process; a BaseException, so that no handler catches it."""


@dataclass
class Countdown:
    """A counter that raises Crash after `left` side effects."""

    left: int

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash


class Mortal:
    """An adapter that ticks the countdown after each write."""

    def __init__(self, real: object, writes: frozenset[str], countdown: Countdown) -> None:
        self._real, self._writes, self._countdown = real, writes, countdown

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._real, name)

        def write(*args: Any, **kwargs: Any) -> Any:
            answer = call(*args, **kwargs)
            self._countdown.tick()
            return answer

        return write if name in self._writes else call


@pytest.mark.parametrize("after", range(1, 10))
def test_job_survives_a_crash_after_any_side_effect(service: FakeService, after: int) -> None:
    job, countdown = service.submit(), Countdown(after)
    store: Any = Mortal(service.store, frozenset({"save", "claim"}), countdown)
    cluster: Any = Mortal(service.cluster, frozenset({"submit"}), countdown)
    try:
        service.reconciler(store=store, cluster=cluster).run_once()
    except Crash:
        service.reconciler().run_once()
    service.reconciler().run_once()
    assert [launch.submission_id for launch in service.cluster.launches] == [f"{job.id}-1"]
    assert service.get(job.id).state is JobState.STARTING
    assert [attempt.number for attempt in service.get(job.id).attempts] == [1]


class CancelsDuringSubmit(MemoryCluster):
    """A cluster on which a user cancels the job during its submission."""

    service: FakeService

    def submit(self, launch: SubmitRequest) -> None:
        self.service.jobs.cancel(OPERATOR, launch.job_id, grace_seconds=60, checkpoint=True)
        super().submit(launch)


def test_cancel_during_the_submit_wins(service: FakeService) -> None:
    cluster = CancelsDuringSubmit()
    cluster.service = service
    service.cluster = cluster
    job = service.submit()
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.CANCELLING
    service.reconciler().run_once()
    assert service.run_dir(job.id).stop() is not None
    cluster.submissions[f"{job.id}-1"] = SubmissionStatus.SUCCEEDED
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.CANCELLED


def test_job_leased_by_another_service_is_left_alone(service: FakeService) -> None:
    job = service.submit()
    service.store.claim(job.id, Lease("other", now=service.clock.now, until=service.clock.now + 30))
    service.reconciler().run_once()
    assert (service.get(job.id).state, service.cluster.launches) == (JobState.STARTING, [])
    service.clock.now += 31
    service.reconciler().run_once()
    assert [launch.submission_id for launch in service.cluster.launches] == [f"{job.id}-1"]


def test_only_the_leader_admits_jobs(service: FakeService) -> None:
    job = service.submit()
    service.store.lead(Lease("other", now=service.clock.now, until=service.clock.now + 30))
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.QUEUED
    service.clock.now += 31
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.STARTING
