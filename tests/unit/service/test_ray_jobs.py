"""What is asked of Ray, and how often."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from service.adapters.ray import jobs as ray_jobs
from service.adapters.ray.jobs import RayJobs
from service.domain.jobs.decide import Submission
from service.errors import ClusterError
from service.ports import Launch
from tests.support.specs import may_read
from train_loop.run_dir import ReadPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Asked(RayJobs):
    """Answers from a list, in the place of Ray's."""

    def __init__(self, *answers: Submission) -> None:
        super().__init__(lambda: None, python="python")
        self.answers: Iterator[Submission] = iter(answers)

    def _ask_status(self, submission_id: str) -> Submission:
        return next(self.answers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_jobs, "time", clock)
    return clock


def test_a_driver_that_runs_is_asked_for_again_after_two_seconds(clock: Clock) -> None:
    jobs = Asked(Submission.RUNNING, Submission.SUCCEEDED)
    assert [jobs.status("job-1-1"), jobs.status("job-1-1")] == [Submission.RUNNING, Submission.RUNNING]
    clock.now += 2
    assert jobs.status("job-1-1") is Submission.SUCCEEDED


@pytest.mark.parametrize("first", [answer for answer in Submission if answer is not Submission.RUNNING])
def test_any_other_answer_is_asked_for_every_time(clock: Clock, first: Submission) -> None:
    jobs = Asked(first, Submission.RUNNING)
    assert [jobs.status("job-1-1"), jobs.status("job-1-1")] == [first, Submission.RUNNING]


def test_drivers_are_told_apart_and_a_stopped_one_is_asked_for_at_once(clock: Clock) -> None:
    jobs = Asked(Submission.RUNNING, Submission.PENDING, Submission.STOPPED)
    assert [jobs.status("job-1-1"), jobs.status("job-2-1")] == [Submission.RUNNING, Submission.PENDING]
    with pytest.raises(ClusterError):
        jobs.stop("job-1-1")
    assert jobs.status("job-1-1") is Submission.STOPPED


class Submitted:
    """Takes a submission, in the place of Ray's client."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.metadata: dict[str, str] = {}

    def submit_job(self, *, runtime_env: dict[str, dict[str, str]], metadata: dict[str, str], **_: object) -> None:
        self.environment, self.metadata = runtime_env["env_vars"], metadata


def test_a_driver_is_told_what_the_service_says_and_how_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"TRAINSHED_SINKS": "mlflow", "RAY_JOB_STOP_SIGNAL": "SIGKILL"}
    jobs, client = RayJobs(lambda: None, python="python", environment=told), Submitted()
    monkeypatch.setattr(jobs, "_connect", lambda: client)
    jobs.submit(Launch("job-1-1", "job-1", "tiny", attempt=1, run_dir="file:///nowhere"))
    assert client.environment["TRAINSHED_SINKS"] == "mlflow"
    assert client.environment["RAY_JOB_STOP_SIGNAL"] == "SIGINT", "its own way to be stopped is nobody's choice"


def test_driver_knows_what_its_project_may_read_without_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_policy(project: str) -> ReadPolicy:
        return may_read(f"s3://{project}", "sftp://user:secret@host/data", project=project)

    jobs, client = RayJobs(lambda: None, python="python", read_policy=read_policy), Submitted()
    monkeypatch.setattr(jobs, "_connect", lambda: client)
    jobs.submit(Launch("job-1-1", "job-1", "tiny", attempt=1, run_dir="file:///nowhere", project="nlp"))
    told = ReadPolicy.model_validate_json(client.environment["TRAINSHED_READ_POLICY"])
    assert told == may_read("s3://nlp", "sftp://host/data", project="nlp")


def test_an_attempt_has_a_name_and_what_it_belongs_to_in_ray_s_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, client = RayJobs(lambda: None, python="python"), Submitted()
    monkeypatch.setattr(jobs, "_connect", lambda: client)
    launch = Launch("job-1-2", "job-1", "tiny", attempt=2, run_dir="file:///nowhere", project="nlp")
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
