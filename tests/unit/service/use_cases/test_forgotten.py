"""Recovery of a service whose database is older than its run directories, e.g. after a restore."""

import copy
from pathlib import Path

import pytest

from service.adapters.key_files import ensure_key
from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.backup import back_up
from service.backup import restore as restore_backup
from service.config.settings import Settings
from service.domain.access.roles import OPERATOR
from service.domain.jobs.job import Job, JobState
from service.domain.jobs.observation import SubmissionStatus
from tests.support.fakes.service import FakeService
from tests.support.fakes.stores import MemoryCluster, MemoryJobStore
from train_loop.run_dir import Fence, Outcome


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


def copy_jobs(service: FakeService) -> dict[str, Job]:
    return copy.copy(store_of(service).jobs)


def store_of(service: FakeService) -> MemoryJobStore:
    assert isinstance(service.store, MemoryJobStore)
    return service.store


def restore(service: FakeService, jobs: dict[str, Job], *, same_cluster: bool) -> None:
    """Reset the database to `jobs` and remove all leases; replace the cluster unless `same_cluster`."""
    store_of(service).jobs = jobs
    store_of(service).leases.clear()
    if not same_cluster:
        service.cluster = MemoryCluster()


def lose_attempt(service: FakeService, job: Job, number: int) -> None:
    """Let an attempt fail and the next one train."""
    service.cluster.submissions[f"{job.id}-{number}"] = SubmissionStatus.FAILED
    service.reconciler().run_once()
    service.clock.now += 1000
    service.reconciler().run_once()
    train(service, job, number + 1)


def train(service: FakeService, job: Job, number: int) -> None:
    service.cluster.submissions[f"{job.id}-{number}"] = SubmissionStatus.RUNNING
    service.event(job.id, "training_started", attempt=number, steps=20, replayed=0)
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.RUNNING


def launched_attempts(service: FakeService) -> list[str]:
    return [launch.submission_id.rpartition("-")[2] for launch in service.cluster.launches]


@pytest.mark.parametrize("known", [0, 1])
@pytest.mark.parametrize("forgotten", [1, 2])
def test_restored_job_adopts_the_running_attempt(service: FakeService, known: int, forgotten: int) -> None:
    job, saved = service.submit(), dict[str, Job]()
    for number in range(known + forgotten):
        if number == known:
            saved = copy_jobs(service)
        if number == 0:
            service.reconciler().run_once()
            train(service, job, 1)
        else:
            lose_attempt(service, job, number)
    before, newest = launched_attempts(service), known + forgotten
    restore(service, saved, same_cluster=True)
    for _ in range(4):
        service.reconciler().run_once()
    now = service.get(job.id)
    assert (now.state, len(now.attempts), now.failures) == (JobState.RUNNING, newest, ())
    assert [attempt.ended_at is None for attempt in now.attempts] == [False] * (newest - 1) + [True]
    assert launched_attempts(service) == before
    service.end(job.id, Outcome(result="succeeded", step=20), attempt=newest)
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.SUCCEEDED


@pytest.mark.parametrize("known", [0, 1])
def test_restored_job_on_another_cluster_fences_the_forgotten_attempt(service: FakeService, known: int) -> None:
    job, saved = service.submit(), dict[str, Job]()
    if known == 0:
        saved = copy_jobs(service)
    service.reconciler().run_once()
    train(service, job, 1)
    if known == 1:
        saved = copy_jobs(service)
        lose_attempt(service, job, 1)
    restore(service, saved, same_cluster=False)
    for _ in range(4):
        service.reconciler().run_once()
        service.clock.now += 100
    assert launched_attempts(service) == [str(known + 2)]
    assert service.run_dir(job.id).fence() == Fence(known + 2)
    train(service, job, known + 2)
    assert len(service.get(job.id).failures) == 1


def test_restored_job_whose_run_succeeded_is_succeeded(service: FakeService) -> None:
    job = service.submit()
    service.reconciler().run_once()
    train(service, job, 1)
    saved = copy_jobs(service)
    lose_attempt(service, job, 1)
    service.end(job.id, Outcome(result="succeeded", step=20), attempt=2)
    service.reconciler().run_once()
    restore(service, saved, same_cluster=False)
    service.reconciler().run_once()
    assert (service.get(job.id).state, launched_attempts(service)) == (JobState.SUCCEEDED, [])


def test_attempt_fenced_before_it_began_is_skipped(service: FakeService) -> None:
    job = service.submit()
    saved = copy_jobs(service)
    service.reconciler().run_once()
    service.jobs.pause(OPERATOR, job.id, grace_seconds=0)
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.STOPPED
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.PAUSED
    restore(service, saved, same_cluster=False)
    for _ in range(4):
        service.reconciler().run_once()
        service.clock.now += 100
    assert launched_attempts(service) == ["2"]


def test_cancel_of_restored_job_reaches_the_running_attempt(service: FakeService) -> None:
    job = service.submit()
    service.reconciler().run_once()
    train(service, job, 1)
    saved = copy_jobs(service)
    lose_attempt(service, job, 1)
    restore(service, saved, same_cluster=True)
    service.jobs.cancel(OPERATOR, job.id, grace_seconds=5, checkpoint=True)
    service.reconciler().run_once()
    stop = service.run_dir(job.id).stop(attempt=2)
    assert stop is not None
    assert stop.mode == "cancel"
    service.end(job.id, Outcome(result="cancelled", step=7), attempt=2)
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.CANCELLED


def test_backup_of_running_job_resumes_on_an_empty_machine(tmp_path: Path) -> None:
    here, there = Settings(home=tmp_path / "here"), Settings(home=tmp_path / "there")
    here.make_home()
    ensure_key(here.admin_key)
    engine = open_database(here.database)
    service = FakeService(tmp_path / "shared", store=SqlJobStore(engine))
    job = service.submit()
    service.reconciler().run_once()
    train(service, job, 1)
    back_up(here, tmp_path / "backup.tar")
    lose_attempt(service, job, 1)
    engine.dispose()

    restore_backup(there, tmp_path / "backup.tar", force=False)
    engine = open_database(there.database)
    elsewhere = FakeService(tmp_path / "shared", store=SqlJobStore(engine), clock=service.clock)
    for _ in range(4):
        elsewhere.reconciler().run_once()
        elsewhere.clock.now += 100
    assert launched_attempts(elsewhere) == ["3"]
    train(elsewhere, job, 3)
    elsewhere.end(job.id, Outcome(result="succeeded", step=20), attempt=3)
    elsewhere.reconciler().run_once()
    done = elsewhere.get(job.id)
    assert (done.state, [one.result for one in done.attempts]) == (
        JobState.SUCCEEDED,
        ["forgotten", "failed", "succeeded"],
    )
    engine.dispose()
