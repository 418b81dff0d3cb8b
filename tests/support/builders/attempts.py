"""Jobs in the middle of an attempt, and single reconcile steps for them."""

from dataclasses import replace

from service.domain.jobs.decide import decide
from service.domain.jobs.decision import Decision
from service.domain.jobs.job import Job, JobState, StopRequest
from service.domain.jobs.observation import Observation, SubmissionStatus
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.stopping import wanted_stop
from tests.support.fakes.service import RETRY, a_job
from train_loop.run_dir import Outcome, Stop

NOW = 100.0
X = Reason(Code.WORKER_FAILURE, "x")
ALIVE = SubmissionStatus.RUNNING


def step(job: Job, seen: Observation, *, now: float = NOW) -> Decision:
    return decide(job, seen, now=now, retry=RETRY)


def live(state: JobState = JobState.RUNNING, *, submitted: bool = True, attempt: int = 1) -> Job:
    """Return a job in the middle of an attempt."""
    job = a_job()
    for number in range(1, attempt + 1):
        job = job.begin_attempt(now=0.0)
        job = job.end_attempt("failed", reason=X, now=1.0) if number < attempt else job
    return replace(job.mark_submitted(now=1.0) if submitted else job, state=state)


def cancelling(*, deadline: float = 200.0, submitted: bool = True) -> Job:
    job = live(JobState.CANCELLING, submitted=submitted)
    return replace(job, stop_request=StopRequest("cancel", checkpoint=True, deadline=deadline))


def pausing(*, deadline: float = 200.0, submitted: bool = True, by: Code = Code.USER) -> Job:
    reason = Reason(by, "paused")
    job = replace(live(JobState.PAUSING, submitted=submitted), reason=reason)
    return replace(job, stop_request=StopRequest("pause", checkpoint=True, deadline=deadline, reason=reason))


def expected_stop(job: Job) -> Stop:
    assert job.stop_request is not None
    return wanted_stop(job.stop_request, job.attempts[-1])


def reason_message(job: Job) -> str:
    assert job.reason is not None
    return job.reason.message


def failed(*, retryable: bool) -> Outcome:
    return Outcome(result="failed", reason="the data ended", code="data_error", retryable=retryable)
