"""Ray jobs: caching of the status, and environment and metadata of a submission."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from service.adapters.ray import jobs as ray_jobs
from service.adapters.ray.jobs import RayJobs
from service.domain.jobs.observation import SubmissionStatus
from service.errors import ClusterError
from service.ports import SubmitRequest
from tests.support.builders.specs import may_read
from train_loop.run_dir import ReadPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class ScriptedRayJobs(RayJobs):
    """Ray jobs whose status comes from a list instead of Ray."""

    def __init__(self, *answers: SubmissionStatus) -> None:
        super().__init__(lambda: None, python="python")
        self.answers: Iterator[SubmissionStatus] = iter(answers)

    def _request_status(self, submission_id: str) -> SubmissionStatus:
        return next(self.answers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_jobs, "time", clock)
    return clock


def test_running_status_is_cached_for_two_seconds(clock: Clock) -> None:
    jobs = ScriptedRayJobs(SubmissionStatus.RUNNING, SubmissionStatus.SUCCEEDED)
    assert [jobs.status("job-1-1"), jobs.status("job-1-1")] == [SubmissionStatus.RUNNING, SubmissionStatus.RUNNING]
    clock.now += 2
    assert jobs.status("job-1-1") is SubmissionStatus.SUCCEEDED


@pytest.mark.parametrize("first", [answer for answer in SubmissionStatus if answer is not SubmissionStatus.RUNNING])
def test_other_statuses_are_not_cached(clock: Clock, first: SubmissionStatus) -> None:
    jobs = ScriptedRayJobs(first, SubmissionStatus.RUNNING)
    assert [jobs.status("job-1-1"), jobs.status("job-1-1")] == [first, SubmissionStatus.RUNNING]


def test_status_cache_is_per_driver_and_cleared_by_stop(clock: Clock) -> None:
    jobs = ScriptedRayJobs(SubmissionStatus.RUNNING, SubmissionStatus.PENDING, SubmissionStatus.STOPPED)
    assert [jobs.status("job-1-1"), jobs.status("job-2-1")] == [SubmissionStatus.RUNNING, SubmissionStatus.PENDING]
    with pytest.raises(ClusterError):
        jobs.stop("job-1-1")
    assert jobs.status("job-1-1") is SubmissionStatus.STOPPED


class FakeClient:
    """A fake of Ray's client that records a submission."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.metadata: dict[str, str] = {}

    def submit_job(self, *, runtime_env: dict[str, dict[str, str]], metadata: dict[str, str], **_: object) -> None:
        self.environment, self.metadata = runtime_env["env_vars"], metadata


def test_submission_passes_environment_and_sets_stop_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TRAINSHED_SINKS": "mlflow", "RAY_JOB_STOP_SIGNAL": "SIGKILL"}
    jobs, client = RayJobs(lambda: None, python="python", environment=environment), FakeClient()
    monkeypatch.setattr(jobs, "_connect", lambda: client)
    jobs.submit(SubmitRequest("job-1-1", "job-1", "tiny", attempt=1, run_dir="file:///nowhere"))
    assert client.environment["TRAINSHED_SINKS"] == "mlflow"
    assert client.environment["RAY_JOB_STOP_SIGNAL"] == "SIGINT", "the environment cannot override the stop signal"


def test_submission_passes_read_policy_without_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_policy(project: str) -> ReadPolicy:
        return may_read(f"s3://{project}", "sftp://user:secret@host/data", project=project)

    jobs, client = RayJobs(lambda: None, python="python", read_policy=read_policy), FakeClient()
    monkeypatch.setattr(jobs, "_connect", lambda: client)
    jobs.submit(SubmitRequest("job-1-1", "job-1", "tiny", attempt=1, run_dir="file:///nowhere", project="nlp"))
    policy = ReadPolicy.model_validate_json(client.environment["TRAINSHED_READ_POLICY"])
    assert policy == may_read("s3://nlp", "sftp://host/data", project="nlp")


def test_submission_metadata_names_job_attempt_project_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, client = RayJobs(lambda: None, python="python"), FakeClient()
    monkeypatch.setattr(jobs, "_connect", lambda: client)
    launch = SubmitRequest("job-1-2", "job-1", "tiny", attempt=2, run_dir="file:///nowhere", project="nlp")
    jobs.submit(replace(launch, labels={"team": "b"}))
    assert client.metadata == {
        "name": "tiny (job-1)",
        "job_name": "tiny (job-1)",
        "job_id": "job-1",
        "attempt": "2",
        "project": "nlp",
        "label.team": "b",
    }
    assert client.environment["RAY_TRAIN_ENABLE_STATE_TRACKING"] == "1"


@pytest.mark.parametrize(
    ("code", "message", "end"),
    [
        (
            -9,
            "Job entrypoint command failed with exit code -9, last …",
            "it was killed by signal 9 (SIGKILL), exit code -9",
        ),
        (1, "Job entrypoint command failed with exit code 1, last …", "it ended with exit code 1"),
        (
            1,
            "Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n"
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'train_loop'\n",
            "it ended with exit code 1 (ModuleNotFoundError: No module named 'train_loop')",
        ),
        (
            1,
            "failed:\nOSError: first\nThe above was the cause\ntrain_loop.run_dir.StorageUnavailable: /mnt: gone",
            "it ended with exit code 1 (StorageUnavailable: /mnt: gone)",
        ),
        (
            127,
            "failed with exit code 127, last available logs:\nbash: line 1: python: command not found",
            "it ended with exit code 127 (bash: line 1: python: command not found)",
        ),
        (1, "failed:\nValueError: token=secret", "it ended with exit code 1"),
        (137, "failed:\nOSError: first", "it was killed by signal 9 (SIGKILL), exit code 137"),
        (-9, "failed:\nOSError: first", "it was killed by signal 9 (SIGKILL), exit code -9"),
        (None, "The node died.\nTraceback (most recent call last):", "Ray reports: The node died."),
        (None, None, None),
    ],
)
def test_end_of_a_driver_names_exit_code_or_rays_explanation(
    monkeypatch: pytest.MonkeyPatch, code: int | None, message: str | None, end: str | None
) -> None:
    jobs = RayJobs(lambda: None, python="python")
    assert jobs.end_of("job-1-1") is None, "the cluster is not up"
    info = SimpleNamespace(driver_exit_code=code, message=message)
    monkeypatch.setattr(jobs, "_connect", lambda: SimpleNamespace(get_job_info=lambda _: info))
    assert jobs.end_of("job-1-1") == end
