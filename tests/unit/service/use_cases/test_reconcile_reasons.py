"""The reasons that the reconciler reports while a job waits."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.adapters.storage.run_dirs import LocalRunDirs
from service.domain.access.roles import OPERATOR
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.reason import Code, storage_unavailable
from service.domain.queue.snapshot import QueueSnapshot
from service.errors import ClusterUnreachable
from service.ports import Node
from service.use_cases.doctor.nodes import list_nodes
from tests.support.fakes.service import FakeService, spec_body, started
from train_loop.plan import missing_places
from train_loop.run_dir import Outcome


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


def test_storage_that_fails_after_the_end_does_not_replace_the_reason(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, ends = started(service), Outcome(result="failed", code="data_error", reason="no rows")
    service.end(job.id, ends)
    reconciler, observe = service.reconciler(), LocalRunDirs.observe

    def fail_after_end(*arguments: Any) -> Any:
        if service.get(job.id).state.terminal:
            raise OSError("the disk failed")
        return observe(*arguments)

    monkeypatch.setattr(LocalRunDirs, "observe", fail_after_end)
    reconciler.run_once()
    reason = service.get(job.id).reason
    assert reason is not None
    assert (reason.code, reason.message) == (Code.DATA_ERROR, "no rows")


@pytest.mark.parametrize("submission", [SubmissionStatus.FAILED, SubmissionStatus.MISSING])
def test_checkpoint_of_an_attempt_is_found_although_its_submission_was_not_stored(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, submission: SubmissionStatus
) -> None:
    """A reconciler that lost its lease submits an attempt, but cannot store that."""
    job = service.get(started(service).id)
    monkeypatch.setattr(LocalRunDirs, "committed", lambda *_: 3)
    unstored = replace(job, attempts=(replace(job.attempts[-1], submitted_at=None),))
    assert service.reconciler().observer.observe(unstored, submission).committed == 3
    assert service.reconciler().observer.observe(unstored, SubmissionStatus.RUNNING).committed is None


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


def test_lost_node_of_the_head_is_named_with_the_command_that_frees_it(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    service.event(job.id, "attempt_started", node="gpu-1")
    reconciler.run_once()
    total, service.cluster.total = service.cluster.total, None
    reconciler.run_once()
    service.clock.now += 60
    reconciler.run_once()
    waits = service.get(job.id).reason
    assert waits is not None
    assert "gpu-1" not in str(waits.remedy)
    service.clock.now += 120
    reconciler.run_once()
    command = "kubectl taint nodes gpu-1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    lost = service.get(job.id).reason
    assert lost is not None
    assert lost.code is Code.CLUSTER_UNREACHABLE
    assert command in str(lost.remedy)
    with pytest.raises(ClusterUnreachable, match=command):
        list_nodes(OPERATOR, service.jobs)
    assert (
        'trainshed_cluster_silent_seconds{head_node="gpu-1"} 180.0' in service.service_metrics.text(OPERATOR).decode()
    )
    service.cluster.total = total
    reconciler.run_once()
    assert service.get(job.id).reason is None
    assert b'trainshed_cluster_silent_seconds{head_node="gpu-1"} 0.0' in service.service_metrics.text(OPERATOR)


def test_service_that_starts_after_the_loss_names_the_node_too(service: FakeService) -> None:
    job = started(service)
    service.event(job.id, "attempt_started", node="gpu-1")
    # The service was on the same node, and starts elsewhere.
    service.cluster.total, reconciler = None, service.reconciler()
    reconciler.run_once()
    service.clock.now += 180
    reconciler.run_once()
    lost = service.get(job.id).reason
    assert lost is not None
    assert "kubectl taint nodes gpu-1 " in str(lost.remedy)
    with pytest.raises(ClusterUnreachable, match="kubectl taint nodes gpu-1 "):
        list_nodes(OPERATOR, service.jobs)


def test_replica_without_the_jobs_names_the_lost_node_too(service: FakeService) -> None:
    job = started(service)
    service.event(job.id, "attempt_started", node="gpu-1")
    holder, other = service.reconciler(), service.reconciler()
    other.owner, other.queue = "another", QueueSnapshot()
    holder.run_once()
    service.cluster.total = None
    other.run_once()
    service.clock.now += 20
    holder.run_once()
    assert other.view.head is None
    other.run_once()
    assert other.queue.head is not None
    assert other.queue.head.name == "gpu-1"


def test_newest_head_counts_as_the_lost_one(service: FakeService) -> None:
    first, second, reconciler = started(service), started(service), service.reconciler()
    service.event(second.id, "attempt_started", node="new", time=200.0)
    service.event(first.id, "attempt_started", node="old", time=100.0)
    reconciler.run_once()
    assert service.jobs.queue.head is not None
    assert service.jobs.queue.head.name == "new"


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


def _run_dir(service: FakeService, job: str) -> Path:
    return Path(service.get(job).run_dir.removeprefix("file://"))


@pytest.mark.parametrize("rest", [(), ("attempts",)], ids=["whole", "with a folder that is still written"])
def test_deleted_run_directory_is_named_and_ends_the_job_once_its_driver_has_ended(
    service: FakeService, rest: tuple[str, ...]
) -> None:
    job, reconciler = started(service), service.reconciler()
    for path in _run_dir(service, job.id).iterdir():
        if path.name not in rest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    reconciler.run_once()
    named = service.get(job.id)
    assert named.reason is not None
    assert (named.state, named.reason.code) == (JobState.RUNNING, Code.STORAGE_UNAVAILABLE)
    assert named.run_dir in named.reason.message
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.FAILED
    reconciler.run_once()
    ended = service.get(job.id)
    assert (ended.state, ended.reason and ended.reason.message) == (JobState.FAILED, named.reason.message)


def test_run_directory_that_returns_ends_the_reason(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    there, away = _run_dir(service, job.id), service.root / "away"
    there.rename(away)
    reconciler.run_once()
    away.rename(there)
    reconciler.run_once()
    assert (service.get(job.id).state, service.get(job.id).reason) == (JobState.RUNNING, None)


def test_workers_that_never_end_without_their_run_directory_are_stopped(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    shutil.rmtree(_run_dir(service, job.id))
    for _ in range(40):
        service.clock.now += 60
        reconciler.run_once()
    assert service.get(job.id).state is JobState.FAILED
    assert service.cluster.submissions[f"{job.id}-1"] is SubmissionStatus.STOPPED


@pytest.mark.parametrize(
    ("content", "wrong"),
    [("{broken", "the stored spec is not JSON"), ("{}", "name"), (spec_body(name="other"), "holds another spec")],
)
def test_spec_that_breaks_between_attempts_ends_the_job_with_its_path(
    service: FakeService, content: str, wrong: str
) -> None:
    job, reconciler = started(service), service.reconciler()
    path = _run_dir(service, job.id) / "spec.json"
    service.end(job.id, Outcome(result="failed", code="worker_failure", reason="x", retryable=True))
    path.write_text(content)
    for _ in range(3):
        reconciler.run_once()
        service.clock.now += 100
    ended = service.get(job.id)
    assert ended.reason is not None
    assert (ended.state, ended.reason.code) == (JobState.FAILED, Code.USER_ERROR)
    assert str(path) in ended.reason.message
    assert wrong in ended.reason.message


def test_spec_that_is_gone_between_attempts_is_written_again(service: FakeService) -> None:
    job, reconciler = started(service), service.reconciler()
    path = _run_dir(service, job.id) / "spec.json"
    service.end(job.id, Outcome(result="failed", code="worker_failure", reason="x", retryable=True))
    path.unlink()
    for _ in range(3):
        reconciler.run_once()
        service.clock.now += 100
    assert len(service.cluster.launches) == 2
    assert path.exists()


def test_run_directory_that_cannot_be_read_is_named_with_its_remedy(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(service)

    def refuse(_: Any, run_dir: str, attempt: int) -> Any:
        raise PermissionError(13, "Permission denied", f"{run_dir}/attempts/{attempt}/events.jsonl")

    monkeypatch.setattr(LocalRunDirs, "observe", refuse)
    service.reconciler().run_once()
    reason = service.get(job.id).reason
    assert reason is not None
    assert job.run_dir in reason.message
    assert "Permission denied" in reason.message
    # The guard of the service makes it an outage.
    assert str(storage_unavailable(reason.message).remedy).startswith("let the users of service and workers read")


def test_full_disk_is_said_to_hold_up_saves_only_where_workers_train() -> None:
    space, error = "free space there, or delete files if it has no inodes left (df -i)", "No space left on device"
    waits = storage_unavailable(error)
    assert waits.remedy == f"{space}; the job then continues"
    trains = storage_unavailable(error, trains=True)
    assert trains.remedy == f"{space}; workers train until their next save, which waits for the storage"
