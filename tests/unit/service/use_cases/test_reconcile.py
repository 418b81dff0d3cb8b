"""The reconciler on a scripted cluster, also with a crash after each side effect."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from service.adapters.storage.run_dirs import LocalRunDirs
from service.domain.access.roles import OPERATOR
from service.domain.jobs.job import Job, JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.reason import Code
from service.ports import Lease, Node, SubmitRequest
from service.use_cases.jobs.reconcile import Reconciler
from tests.support.fakes.service import FakeService, started
from tests.support.fakes.stores import MemoryCluster
from train_loop.plan import Capacity, missing_places
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


def test_unreachable_cluster_changes_only_the_reason_and_only_after_ten_seconds(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    before, total, service.cluster.total = service.get(job.id), service.cluster.total, None
    reconciler.run_once()
    service.clock.now += 9
    reconciler.run_once()
    assert service.get(job.id) == before
    service.clock.now += 1
    reconciler.run_once()
    silent = service.get(job.id)
    message = "Ray has not answered since 00:16:40 UTC"
    assert silent.reason is not None
    assert (silent.state, silent.reason.code, silent.reason.message) == (
        before.state,
        Code.CLUSTER_UNREACHABLE,
        message,
    )
    assert service.jobs.get(OPERATOR, job.id).waits_for == silent.reason
    service.clock.now += 3600
    reconciler.run_once()
    assert service.get(job.id) == silent
    service.cluster.total = total
    reconciler.run_once()
    assert (service.get(job.id).reason, service.jobs.get(OPERATOR, job.id).waits_for) == (None, None)


def test_recovering_job_without_capacity_names_missing_resources_and_lost_node(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    service.event(job.id, "workers_lost", ranks=[1], hosts=["node3"], cause="host_lost", error="host node3 was lost")
    reconciler.run_once()
    lost = service.get(job.id)
    assert lost.reason is not None
    assert (lost.state, lost.reason.code) == (JobState.RECOVERING, Code.HOST_LOST)
    assert lost.reason.message == "host node3 was lost; the run resumes from its newest checkpoint"
    # All workers fit, although no CPU is left for Ray Data: the ranks read their rows themselves.
    service.cluster.total, service.cluster.nodes_total = {"CPU": 2.0}, ({"CPU": 2.0},)
    reconciler.run_once()
    assert service.get(job.id).reason == lost.reason
    service.cluster.total, service.cluster.nodes_total = {"CPU": 1.0}, ({"CPU": 1.0},)
    # Ray may have forgotten the name of a dead host.
    service.cluster.known_nodes = [Node("id-3", "10.0.0.3", "10.0.0.3", alive=False, ended_at=service.clock())]
    reconciler.run_once()
    waits = service.jobs.get(OPERATOR, job.id).waits_for
    assert waits is not None
    assert waits.code is Code.CAPACITY
    shown = "2 workers with 1 CPU each; the nodes have room for 1; node3 left the cluster"
    assert waits.message == f"waits for {shown}"
    # The driver reports the same text, with the start of the wait.
    missing = missing_places(service.get(job.id).size, service.cluster.nodes_total)
    service.event(job.id, "waiting_for_capacity", missing=missing, left=["node3"], since=3723.0)
    reconciler.run_once()
    waits = service.jobs.get(OPERATOR, job.id).waits_for
    assert waits is not None
    assert waits.message == f"waits since 01:02:03 UTC for {shown}"


def test_recovering_job_on_nodes_of_unknown_size_names_missing_resources(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    service.event(job.id, "workers_lost", ranks=[1], hosts=["node3"], cause="host_lost", error="host node3 was lost")
    reconciler.run_once()
    lost = service.get(job.id)
    service.cluster.total, service.cluster.nodes_total = {"CPU": 1.0}, ()
    reconciler.run_once()
    waits = service.jobs.get(OPERATOR, job.id).waits_for
    assert waits is not None
    assert waits.message.startswith("waits for capacity: 2 workers need 2 CPU (the cluster has 1)")
    service.cluster.total, service.cluster.nodes_total = {"CPU": 4.0}, ()
    reconciler.run_once()
    assert service.get(job.id).reason == lost.reason


def test_stalled_group_is_the_reason_until_it_progresses(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    stalled: dict[str, Any] = {"waiting": [0, 1], "for": [2], "hosts": ["node3"], "step": 41, "seconds": 12.0}
    service.event(job.id, "stalled", **stalled)
    reconciler.run_once()
    view = service.jobs.get(OPERATOR, job.id)
    assert view.waits_for is not None
    assert (view.job.state, view.waits_for.code) == (JobState.RUNNING, Code.STALLED)
    assert view.waits_for.message == "step 41 has made no progress for 12 s: ranks 0 and 1 wait for rank 2 on node3"
    service.event(job.id, "progressing")
    reconciler.run_once()
    assert service.get(job.id).reason is None


def test_long_silence_without_events_is_reported_as_stalled(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    reconciler.run_once()
    for number in range(1, 5):
        service.metric(job.id, step=number)
        for _ in range(4):
            reconciler.run_once()
            service.clock.now += 1
    # The newest line was seen at 1012 s; two lines are at most 3 s apart.
    for now in range(1017, 1026):
        service.clock.now = now
        reconciler.run_once()
        assert (service.get(job.id).reason is None) == (now < 1022)
    silent = service.jobs.get(OPERATOR, job.id).waits_for
    assert silent is not None
    assert silent.code is Code.STALLED
    assert silent.message == "no step has ended since 00:16:52 UTC; until then the longest took 3 s"
    service.metric(job.id, step=5)
    reconciler.run_once()
    assert service.get(job.id).reason is None


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


def test_failed_submission_reports_its_reason_and_is_retried(service: FakeService) -> None:
    job = service.submit()
    blocked = service.root / "default"
    blocked.write_text("a file where the folder should be")
    service.reconciler().run_once()
    assert "Not a directory" in str(service.get(job.id).reason)
    blocked.unlink()
    service.reconciler().run_once()
    assert len(service.cluster.launches) == 1
    assert service.get(job.id).reason is None


def running(service: FakeService, **parts: Any) -> Job:
    """Submit a job and run the reconciler until it trains."""
    job = service.submit(**parts)
    service.reconciler().run_once()
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    service.event(job.id, "training_started", steps=20, replayed=0)
    service.reconciler().run_once()
    return job


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


def test_only_the_leader_admits_jobs(service: FakeService) -> None:
    job = service.submit()
    service.store.lead(Lease("other", now=service.clock.now, until=service.clock.now + 30))
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.QUEUED
    service.clock.now += 31
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.STARTING


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


class LostCheckpoints(LocalRunDirs):
    """Run directories whose storage fails once the newest committed step is read."""

    def committed(self, run_dir: str) -> int | None:
        """Raise the error of a network file system that does not answer."""
        raise TimeoutError("storage does not answer")


def test_storage_that_fails_between_two_reads_is_the_reason_of_the_job(tmp_path: Path) -> None:
    service = FakeService(tmp_path)
    job = started(service)
    service.end(job.id, Outcome(result="succeeded", step=20))
    service.run_dirs = LostCheckpoints()
    service.reconciler().run_once()
    away = service.get(job.id)
    assert (away.state, away.reason.code if away.reason else None) == (JobState.RUNNING, Code.STORAGE_UNAVAILABLE)
    service.run_dirs = LocalRunDirs()
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.SUCCEEDED
