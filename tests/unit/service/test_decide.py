"""Every rule by which a job moves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.admission import Queue
from service.domain.decide import Decision, Effect, Seen, Submission, Training, decide, wanted_stop
from service.domain.job import TRANSITIONS, Cancel, Job, JobState
from tests.support.service import RETRY, a_job
from train_loop.run_dir import Outcome, Stop

NOW = 100.0
ROOM = Queue({"CPU": 8.0})
ALIVE = Submission.RUNNING


def step(job: Job, seen: Seen, *, now: float = NOW) -> Decision:
    return decide(job, seen, now=now, retry=RETRY)


def live(state: JobState = JobState.RUNNING, *, submitted: bool = True, attempt: int = 1) -> Job:
    """A job in the middle of an attempt."""
    job = a_job()
    for number in range(1, attempt + 1):
        job = job.begin_attempt(now=0.0)
        job = job.end_attempt("failed", reason="x", now=1.0) if number < attempt else job
    return replace(job.mark_submitted(now=1.0) if submitted else job, state=state)


def cancelling(*, deadline: float = 200.0, submitted: bool = True) -> Job:
    job = live(JobState.CANCELLING, submitted=submitted)
    return replace(job, cancel=Cancel(deadline, checkpoint=True))


def failed(*, retryable: bool) -> Outcome:
    return Outcome(result="failed", reason="the data ended", code="data_error", retryable=retryable)


def test_queued_job_with_room_gets_its_attempt_before_anything_is_submitted() -> None:
    decision = step(a_job("job-7"), Seen(queue=ROOM))
    assert decision.effect is None
    assert decision.job.state is JobState.STARTING
    assert [attempt.submission_id for attempt in decision.job.attempts] == ["job-7-1"]


def test_queued_job_without_room_stays_with_a_reason() -> None:
    decision = step(a_job(), Seen(queue=Queue(None)))
    assert decision.job.state is JobState.QUEUED
    assert decision.job.reason == "the cluster is not reachable yet; the job starts once it answers"


def test_new_attempt_that_the_cluster_does_not_have_is_submitted() -> None:
    decision = step(live(JobState.STARTING, submitted=False), Seen(Submission.MISSING))
    assert decision.effect is Effect.SUBMIT
    assert decision.job.attempts[-1].submitted_at == NOW


def test_submission_found_after_a_crash_is_not_made_again() -> None:
    decision = step(live(JobState.STARTING, submitted=False), Seen(Submission.PENDING))
    assert decision.effect is None
    assert decision.job.attempts[-1].submitted_at == NOW


def test_starting_job_runs_once_training_started() -> None:
    assert step(live(JobState.STARTING), Seen(ALIVE, Training.YES)).job.state is JobState.RUNNING


def test_lost_workers_are_recovering_and_then_running_again() -> None:
    lost = step(live(), Seen(ALIVE, Training.LOST)).job
    assert (lost.state, len(lost.attempts)) == (JobState.RECOVERING, 1)
    assert step(lost, Seen(ALIVE, Training.YES)).job.state is JobState.RUNNING


def test_workers_lost_between_two_looks_pass_through_running() -> None:
    seen = Seen(ALIVE, Training.LOST)
    running = step(live(JobState.STARTING), seen).job
    assert (running.state, step(running, seen).job.state) == (JobState.RUNNING, JobState.RECOVERING)


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
def test_success_ends_the_job(state: JobState) -> None:
    job = step(live(state), Seen(Submission.SUCCEEDED, outcome=Outcome(result="succeeded"))).job
    assert (job.state, job.finished_at, job.attempts[-1].result) == (JobState.SUCCEEDED, NOW, "succeeded")


def test_failure_that_repeats_itself_is_final() -> None:
    job = step(live(), Seen(ALIVE, outcome=failed(retryable=False))).job
    assert (job.state, job.reason) == (JobState.FAILED, "the data ended")


def test_retryable_failure_waits_longer_each_time() -> None:
    first = step(live(), Seen(ALIVE, outcome=failed(retryable=True))).job
    second = step(live(attempt=2), Seen(ALIVE, outcome=failed(retryable=True))).job
    assert (first.state, first.next_attempt_at) == (JobState.RECOVERING, NOW + 10)
    assert second.next_attempt_at == NOW + 20
    assert first.reason == "attempt 1 of 3 failed: the data ended"


def test_starting_job_stays_starting_when_an_attempt_fails() -> None:
    assert step(live(JobState.STARTING), Seen(ALIVE, outcome=failed(retryable=True))).job.state is JobState.STARTING


def test_last_attempt_is_the_last() -> None:
    job = step(live(attempt=3), Seen(ALIVE, outcome=failed(retryable=True))).job
    assert (job.state, job.reason) == (JobState.FAILED, "attempt 3 of 3 failed: the data ended")


@pytest.mark.parametrize("gone", [Submission.MISSING, Submission.FAILED, Submission.STOPPED, Submission.SUCCEEDED])
def test_driver_that_is_gone_without_a_word_is_a_failed_attempt(gone: Submission) -> None:
    job = step(live(), Seen(gone)).job
    assert job.state is JobState.RECOVERING
    assert job.reason == f"attempt 1 of 3 failed: the driver was lost (its submission is {gone})"


def test_next_attempt_begins_when_its_time_has_come() -> None:
    job = step(live(), Seen(Submission.FAILED)).job
    assert step(job, Seen(Submission.FAILED), now=NOW + 9).job is job
    assert [a.number for a in step(job, Seen(Submission.FAILED), now=NOW + 10).job.attempts] == [1, 2]


def test_next_attempt_waits_until_the_old_driver_is_gone() -> None:
    job = step(live(), Seen(ALIVE, outcome=failed(retryable=True))).job
    decision = step(job, Seen(ALIVE), now=NOW + 10)
    assert (decision.effect, decision.job) == (Effect.STOP_NOW, job)


def test_cancel_before_any_attempt_ends_at_once() -> None:
    job = replace(a_job(), state=JobState.CANCELLING, cancel=Cancel(200.0, checkpoint=True))
    assert step(job, Seen()).job.state is JobState.CANCELLED


def test_cancel_before_the_submit_never_submits() -> None:
    job = cancelling(submitted=False)
    asked = step(job, Seen(Submission.MISSING))
    done = step(job, Seen(Submission.MISSING, stop=wanted_stop(job)))
    assert (asked.effect, done.effect) == (Effect.ASK_TO_STOP, None)
    assert done.job.state is JobState.CANCELLED


def test_cancel_asks_the_loop_once_and_waits_for_its_answer() -> None:
    job = cancelling()
    stop = Stop(mode="cancel", checkpoint=True, deadline=200.0)
    assert step(job, Seen(ALIVE)).effect is Effect.ASK_TO_STOP
    assert step(job, Seen(ALIVE, stop=stop)) == Decision(job)
    ended = step(job, Seen(ALIVE, stop=stop, outcome=Outcome(result="cancelled", step=7))).job
    assert (ended.state, ended.attempts[-1].result) == (JobState.CANCELLED, "cancelled")


def test_cancel_ends_the_driver_when_patience_ends() -> None:
    job = cancelling(deadline=150.0)
    seen = Seen(ALIVE, stop=wanted_stop(job))
    assert step(job, seen, now=149.0).effect is None
    assert step(job, seen, now=150.0).effect is Effect.STOP_NOW
    assert step(job, replace(seen, submission=Submission.STOPPED), now=151.0).job.state is JobState.CANCELLED


outcomes = st.builds(
    Outcome,
    result=st.sampled_from(["succeeded", "paused", "cancelled", "resized", "failed"]),
    retryable=st.booleans(),
)
sightings = st.builds(
    Seen,
    submission=st.sampled_from(Submission),
    training=st.sampled_from(Training),
    outcome=st.none() | outcomes,
    stop=st.none() | st.just(wanted_stop(cancelling())),
    queue=st.sampled_from([ROOM, Queue(None), Queue({"CPU": 1.0})]),
)
jobs = st.sampled_from([a_job(), cancelling(), cancelling(submitted=False)]) | st.builds(
    live,
    st.sampled_from([JobState.STARTING, JobState.RUNNING, JobState.RECOVERING]),
    submitted=st.booleans(),
    attempt=st.integers(1, 3),
)


@given(jobs, sightings)
def test_unknown_is_not_failed(job: Job, seen: Seen) -> None:
    if job.attempts:
        assert step(job, replace(seen, submission=Submission.UNKNOWN, outcome=None)).job == job


@given(jobs, sightings, outcomes)
def test_an_outcome_counts_without_a_cluster_to_confirm_it(job: Job, seen: Seen, outcome: Outcome) -> None:
    if job.attempts:
        found = [step(job, replace(seen, submission=s, outcome=outcome)).job for s in (ALIVE, Submission.UNKNOWN)]
        assert found[0] == found[1]


def test_a_disk_that_takes_no_stop_file_does_not_keep_a_job_alive_past_its_deadline() -> None:
    job = cancelling()
    assert step(job, Seen(ALIVE), now=NOW).effect is Effect.ASK_TO_STOP
    assert step(job, Seen(ALIVE), now=1e9).effect is Effect.STOP_NOW


@given(jobs, st.lists(sightings, max_size=12))
def test_any_history_is_legal_and_has_one_live_attempt(job: Job, history: list[Seen]) -> None:
    for passed, seen in enumerate(history):
        after = step(job, seen, now=NOW + 60 * passed).job
        assert after.state is job.state or after.state in TRANSITIONS[job.state]
        assert sum(attempt.ended_at is None for attempt in after.attempts) <= 1
        assert len(after.attempts) <= max(after.spec.failure.max_attempts, len(job.attempts))
        assert not (after.state.terminal and any(attempt.ended_at is None for attempt in after.attempts))
        job = after


@given(sightings, st.sampled_from([state for state in JobState if state.terminal]))
def test_terminal_is_final(seen: Seen, state: JobState) -> None:
    job = replace(live(), state=state)
    assert step(job, seen) == Decision(job)
