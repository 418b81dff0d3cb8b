"""Rules of decide for attempts that end with their head, as planned or before they began."""

from dataclasses import replace

import pytest

from service.domain.jobs.job import Job, JobState
from service.domain.jobs.observation import Observation, SubmissionStatus, WorkerStatus
from service.domain.jobs.reason import Code
from tests.support.builders.attempts import ALIVE, NOW, live, reason_message, step
from train_loop.run_dir import Outcome, Stop

LEAVES = Stop(mode="pause", attempt=1, reason="the head ends as planned")
LOST = Outcome(result="failed", reason="a worker was lost", code="worker_failure", retryable=True)


def _of_newest(job: Job, seen: Observation) -> Observation:
    """Return an observation whose notice is for the newest attempt."""
    stop = seen.stop
    return seen if stop is None else replace(seen, stop=stop.model_copy(update={"attempt": len(job.attempts)}))


def _next_attempt(job: Job) -> Job:
    return replace(job.begin_attempt(now=NOW).mark_submitted(now=NOW), next_attempt_at=None)


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
@pytest.mark.parametrize("outcome", [Outcome(result="paused", step=7), Outcome(result="moved"), LOST, None])
def test_planned_end_of_the_head_is_named_and_no_failure(state: JobState, outcome: Outcome | None) -> None:
    submission = ALIVE if outcome is not None else SubmissionStatus.MISSING
    job = step(live(state), Observation(submission, outcome=outcome, stop=LEAVES, committed=7)).job
    assert (job.failures, job.attempts[-1].result) == ((), "moved")
    assert job.state is (JobState.STARTING if state is JobState.STARTING else JobState.RECOVERING)
    assert reason_message(job).startswith("the head ends as planned; ")
    assert reason_message(job).endswith("the run resumes from step 7")
    assert job.attempts[-1].reason == job.reason
    # The old head may still answer for some seconds.
    assert job.next_attempt_at is not None
    assert job.next_attempt_at > NOW
    again = step(job, Observation(SubmissionStatus.MISSING), now=job.next_attempt_at).job
    assert len(again.attempts) == 2
    # The reason stays until the next attempt trains.
    begun = step(again, Observation(SubmissionStatus.MISSING)).job
    assert step(begun, Observation(ALIVE)).job.reason == job.reason
    assert step(begun, Observation(ALIVE, WorkerStatus.YES)).job.reason is None


@pytest.mark.parametrize(
    "job",
    [live(JobState.STARTING), live(JobState.RECOVERING, attempt=3), live().catch_up(2, None, now=1.0)],
    ids=["first", "third", "after one without a reason"],
)
def test_attempt_that_a_head_took_with_it_before_it_began_is_no_failure(job: Job) -> None:
    failed_before = job.failures
    job = step(job, Observation(SubmissionStatus.MISSING)).job
    assert (job.failures, job.attempts[-1].result) == (failed_before, "moved")
    assert reason_message(job) == "the head of Ray has ended before the driver had started"
    later = step(job, Observation(SubmissionStatus.MISSING), now=job.next_attempt_at or 0).job
    assert len(later.attempts) == len(job.attempts) + 1


@pytest.mark.parametrize(
    ("end", "first"),
    [
        (Observation(SubmissionStatus.MISSING), 10),
        (Observation(SubmissionStatus.FAILED, stop=LEAVES, has_output=True), 10),
        (Observation(SubmissionStatus.MISSING, stop=LEAVES, outcome=LOST), 10),
        (Observation(ALIVE, outcome=Outcome(result="moved")), 0),
    ],
    ids=["head", "driver", "ranks", "drained"],
)
def test_moves_again_and_again_without_a_new_checkpoint_are_delayed_more_and_more_and_counted(
    end: Observation, first: float
) -> None:
    job, delays, messages = live(JobState.STARTING), list[float](), list[str]()
    for _ in range(8):
        job = step(job, _of_newest(job, end)).job
        delays.append((job.next_attempt_at or 0) - NOW)
        messages.append(reason_message(job))
        job = _next_attempt(job)
    assert delays == [first, 20, 40, 80, 160, 300, 300, 300]
    assert (job.failures, "in a row" in messages[0]) == ((), False)
    row = "; 3 attempts in a row ended this way without a new checkpoint, so the next one waits 40 s"
    assert messages[2] == messages[0] + row
    assert job.attempts[2].reason is not None
    assert (job.attempts[2].reason.code, "again and again" in str(job.attempts[2].reason.remedy)) == (Code.MOVING, True)
    # A new checkpoint ends the row, an old one does not; so does an end of another kind.
    saved = step(job, replace(_of_newest(job, end), committed=7)).job
    assert (saved.next_attempt_at, "in a row" in reason_message(saved)) == (NOW + first, False)
    once = step(_next_attempt(saved), replace(_of_newest(_next_attempt(saved), end), committed=7)).job
    assert once.next_attempt_at == NOW + first
    again = _next_attempt(once)
    assert step(again, replace(_of_newest(again, end), committed=7)).job.next_attempt_at == NOW + 20
    failed = _next_attempt(step(job, Observation(SubmissionStatus.FAILED, has_output=True)).job)
    assert step(failed, _of_newest(failed, end)).job.next_attempt_at == NOW + first


@pytest.mark.parametrize(
    ("stop", "outcome"),
    [
        (LEAVES.model_copy(update={"attempt": 2}), LOST),
        (LEAVES.model_copy(update={"reason": None}), LOST),
        (LEAVES, LOST.model_copy(update={"retryable": False})),
    ],
)
def test_other_ends_are_not_excused_by_a_planned_end(stop: Stop, outcome: Outcome) -> None:
    job = step(live(), Observation(ALIVE, outcome=outcome, stop=stop)).job
    assert len(job.failed) == 1


def test_success_and_silence_of_a_planned_end_stay_what_they_are() -> None:
    assert (
        step(live(), Observation(ALIVE, outcome=Outcome(result="succeeded"), stop=LEAVES)).job.state
        is JobState.SUCCEEDED
    )
    silent = step(live(), Observation(SubmissionStatus.UNKNOWN, stop=LEAVES)).job
    assert silent.attempts[-1].ended_at is None
    assert step(live(), Observation(ALIVE, WorkerStatus.YES, stop=LEAVES)).job.attempts[-1].ended_at is None
