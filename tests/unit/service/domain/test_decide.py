"""Rules of decide: the state change and the effects that follow from each observation."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.jobs.decision import Decision, Effect
from service.domain.jobs.job import TRANSITIONS, Job, JobState
from service.domain.jobs.observation import Observation, SubmissionStatus, WorkerStatus
from service.domain.jobs.reason import HANG_REMEDY, Code, Reason
from service.domain.jobs.transitions import start
from tests.support.builders.attempts import (
    ALIVE,
    NOW,
    cancelling,
    expected_stop,
    failed,
    live,
    pausing,
    reason_message,
    step,
)
from tests.support.fakes.service import a_job
from train_loop.run_dir import Outcome, Stop


def test_start_creates_attempt_before_any_submission() -> None:
    job = start(a_job("job-7"), now=NOW)
    assert job.state is JobState.STARTING
    assert [attempt.submission_id for attempt in job.attempts] == ["job-7-1"]
    assert [attempt.workers for attempt in job.attempts] == [2]


def test_attempt_missing_on_the_cluster_is_submitted() -> None:
    decision = step(live(JobState.STARTING, submitted=False), Observation(SubmissionStatus.MISSING))
    assert decision.effects == (Effect.SUBMIT,)
    assert decision.job.attempts[-1].submitted_at == NOW


def test_submission_found_after_a_crash_is_not_repeated() -> None:
    decision = step(live(JobState.STARTING, submitted=False), Observation(SubmissionStatus.PENDING))
    assert decision.effects == ()
    assert decision.job.attempts[-1].submitted_at == NOW


def test_starting_job_runs_once_training_started() -> None:
    assert step(live(JobState.STARTING), Observation(ALIVE, WorkerStatus.YES)).job.state is JobState.RUNNING


def test_lost_workers_make_job_recovering_until_training_restarts() -> None:
    lost = step(live(), Observation(ALIVE, WorkerStatus.LOST)).job
    assert (lost.state, len(lost.attempts)) == (JobState.RECOVERING, 1)
    assert step(lost, Observation(ALIVE, WorkerStatus.YES)).job.state is JobState.RUNNING


def test_workers_lost_between_two_observations_pass_through_running() -> None:
    seen = Observation(ALIVE, WorkerStatus.LOST)
    running = step(live(JobState.STARTING), seen).job
    assert (running.state, step(running, seen).job.state) == (JobState.RUNNING, JobState.RECOVERING)


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
def test_success_ends_the_job(state: JobState) -> None:
    job = step(live(state), Observation(SubmissionStatus.SUCCEEDED, outcome=Outcome(result="succeeded"))).job
    assert (job.state, job.finished_at, job.attempts[-1].result) == (JobState.SUCCEEDED, NOW, "succeeded")


def test_non_retryable_failure_fails_the_job() -> None:
    job = step(live(), Observation(ALIVE, outcome=failed(retryable=False))).job
    assert (job.state, job.reason) == (JobState.FAILED, Reason(Code.DATA_ERROR, "the data ended"))


def test_retryable_failure_delay_grows_with_each_attempt() -> None:
    first = step(live(), Observation(ALIVE, outcome=failed(retryable=True))).job
    second = step(live(attempt=2), Observation(ALIVE, outcome=failed(retryable=True))).job
    assert first.state is JobState.RECOVERING
    assert 7.5 <= (first.next_attempt_at or 0) - NOW <= 10
    assert 15 <= (second.next_attempt_at or 0) - NOW <= 20
    assert reason_message(first) == "attempt 1 failed (1 of 3): the data ended"


def test_version_skew_is_retried_with_growing_delay_and_not_counted_as_failure() -> None:
    skew = Outcome(result="failed", code="version_skew", reason="the service runs 2 and the cluster 1", retryable=True)
    job, delays = live(JobState.STARTING), list[float]()
    for _ in range(8):
        job = step(job, Observation(ALIVE, outcome=skew)).job
        assert (job.state, reason_message(job)) == (
            JobState.STARTING,
            f"attempt {len(job.attempts)} failed: {skew.reason}",
        )
        delays.append((job.next_attempt_at or 0) - NOW)
        job = replace(job.begin_attempt(now=NOW), next_attempt_at=None)
    assert job.failures == ()
    assert all(7.5 * 2**number <= delay <= 10 * 2**number for number, delay in enumerate(delays[:4]))
    assert max(delays) <= 300


def test_starting_job_stays_starting_when_an_attempt_fails() -> None:
    assert (
        step(live(JobState.STARTING), Observation(ALIVE, outcome=failed(retryable=True))).job.state is JobState.STARTING
    )


def test_last_failed_attempt_is_a_crash_loop_and_its_reason_lists_all_attempts() -> None:
    job = step(live(attempt=3), Observation(ALIVE, outcome=failed(retryable=True))).job
    assert (job.state, job.reason and job.reason.code) == (JobState.FAILED, Code.CRASH_LOOP)
    assert reason_message(job).endswith("without progress: attempt 1: x; attempt 2: x; attempt 3: the data ended")


FULL = "OSError: [Errno 28] No space left on device: '/runs/a'"


@pytest.mark.parametrize(
    "seen",
    [
        Observation(ALIVE, outcome=Outcome(result="failed", reason=FULL, code="worker_failure", retryable=True)),
        Observation(SubmissionStatus.FAILED, driver_end=f"it ended with exit code 1 ({FULL})", has_output=True),
    ],
    ids=["reported", "lost"],
)
def test_errors_of_storage_have_their_remedy_also_in_the_last_reason(seen: Observation) -> None:
    first, last = step(live(), seen).job, step(live(attempt=3), seen).job
    assert FULL in reason_message(first)
    assert first.reason is not None
    assert last.reason is not None
    assert str(first.reason.remedy).startswith("free space there")
    assert last.reason.remedy == f"{first.reason.remedy}, and clone the job, or raise failure.max_attempts"


def test_hang_names_the_late_rank_and_the_remedy_also_in_the_last_reason() -> None:
    stalled = Reason(Code.STALLED, "step 4 has made no progress for 8 s: rank 0 waits for rank 1 on node1")
    seen = Observation(ALIVE, WorkerStatus.YES, idle_seconds=1e6, condition=stalled)
    job = step(live(), seen).job
    assert reason_message(job).endswith(f"the attempt hung: nothing was written for 1000000 s; {stalled.message}")
    reported = Outcome(result="failed", code="hung", reason="training hung at step 4", retryable=True)
    ended = step(live(attempt=3), Observation(ALIVE, outcome=reported)).job
    assert ended.attempts[-1].reason == Reason(Code.HUNG, "training hung at step 4", HANG_REMEDY)
    assert ended.reason is not None
    assert ended.reason.remedy == f"{HANG_REMEDY}, and clone the job, or raise failure.max_attempts"


def test_attempt_that_committed_a_step_resets_failure_count() -> None:
    job = live(attempt=3)
    job = step(job, Observation(ALIVE, outcome=failed(retryable=True), committed=10)).job
    assert (job.state, [attempt.number for attempt in job.failures]) == (JobState.RECOVERING, [3])
    again = replace(job.begin_attempt(now=NOW), state=JobState.RUNNING).mark_submitted(now=NOW)
    job = step(again, Observation(ALIVE, outcome=failed(retryable=True), committed=10)).job
    assert (job.state, [attempt.number for attempt in job.failures]) == (JobState.RECOVERING, [3, 4])


def test_max_attempts_1_fails_job_even_after_progress() -> None:
    job = replace(live(), spec=a_job(failure={"max_attempts": 1}).spec)
    assert step(job, Observation(ALIVE, outcome=failed(retryable=True), committed=10)).job.state is JobState.FAILED


@pytest.mark.parametrize(
    "gone", [SubmissionStatus.MISSING, SubmissionStatus.FAILED, SubmissionStatus.STOPPED, SubmissionStatus.SUCCEEDED]
)
def test_driver_lost_without_outcome_fails_the_attempt(gone: SubmissionStatus) -> None:
    job = step(live(), Observation(gone, has_output=True)).job
    assert job.state is JobState.RECOVERING
    lost = f"the driver was lost: the status of its submission is {gone}"
    if gone is SubmissionStatus.STOPPED:
        lost = "the driver was lost: it was stopped in Ray"
    assert job.attempts[-1].reason == Reason(Code.DRIVER_LOST, lost)
    assert reason_message(job) == f"attempt 1 failed (1 of 3): {lost}"


def test_next_attempt_begins_after_its_delay() -> None:
    job = step(live(), Observation(SubmissionStatus.FAILED)).job
    assert step(job, Observation(SubmissionStatus.FAILED), now=NOW + 7).job is job
    assert [a.number for a in step(job, Observation(SubmissionStatus.FAILED), now=NOW + 10).job.attempts] == [1, 2]


def test_attempt_is_submitted_only_after_previous_driver_is_gone() -> None:
    job = live(JobState.RECOVERING, submitted=False, attempt=2)
    found = [
        step(job, Observation(SubmissionStatus.MISSING, previous=before))
        for before in (ALIVE, SubmissionStatus.UNKNOWN)
    ]
    assert found == [Decision(job, (Effect.STOP_PREVIOUS,)), Decision(job)]
    assert step(job, Observation(SubmissionStatus.MISSING, previous=SubmissionStatus.STOPPED)).effects == (
        Effect.SUBMIT,
    )


@pytest.mark.parametrize("outcome", ["succeeded", "paused"])
def test_job_leaving_the_cluster_is_fenced_off_first(outcome: Literal["succeeded", "paused"]) -> None:
    job = pausing() if outcome == "paused" else live()
    assert step(job, Observation(ALIVE, outcome=Outcome(result=outcome))).effects == (Effect.FENCE_OFF,)
    assert step(live(attempt=3), Observation(SubmissionStatus.FAILED)).effects == (Effect.FENCE_OFF,)


def test_idle_attempt_is_stopped_and_retried_after_hang_timeout() -> None:
    job = replace(live(), spec=a_job(failure={"hang_timeout_seconds": 100}, training={"logging_steps": 3}).spec)
    assert step(job, Observation(ALIVE, WorkerStatus.YES, idle_seconds=360.0)) == Decision(job)
    decision = step(job, Observation(ALIVE, WorkerStatus.YES, idle_seconds=361.0, committed=10))
    assert (decision.effects, decision.job.state) == ((Effect.STOP_NOW,), JobState.RECOVERING)
    assert decision.job.attempts[-1].reason == Reason(
        Code.HUNG, "the attempt hung: nothing was written for 361 s", HANG_REMEDY
    )


def test_hung_last_attempt_is_stopped_and_fails_the_job() -> None:
    job = replace(live(), spec=a_job(failure={"hang_timeout_seconds": 100, "max_attempts": 1}).spec)
    decision = step(job, Observation(ALIVE, WorkerStatus.YES, idle_seconds=999.0))
    assert (decision.effects, decision.job.state) == ((Effect.STOP_NOW, Effect.FENCE_OFF), JobState.FAILED)


def test_lost_workers_reason_is_the_observed_loss() -> None:
    lost = step(
        live(), Observation(ALIVE, WorkerStatus.LOST, loss_reason=Reason(Code.HOST_LOST, "host node3 was lost"))
    ).job
    assert lost.reason == Reason(Code.HOST_LOST, "host node3 was lost")


SILENT = Reason(Code.CLUSTER_UNREACHABLE, "Ray has not answered since 10:00:00 UTC")
STALLED = Reason(Code.STALLED, "step 7 has made no progress for 12 s")


@pytest.mark.parametrize("job", [live(), live(JobState.STARTING), live(JobState.RECOVERING), cancelling(), pausing()])
def test_unreachable_cluster_changes_only_the_reason(job: Job) -> None:
    silent = step(job, Observation(SubmissionStatus.UNKNOWN, stop=_stop(job), unreachable=SILENT))
    assert silent == Decision(replace(job, reason=SILENT))
    later = replace(SILENT, message="Ray has not answered since 11:00:00 UTC")
    assert step(silent.job, Observation(SubmissionStatus.UNKNOWN, stop=_stop(job), unreachable=later)).job == silent.job
    answered = step(silent.job, Observation(ALIVE, WorkerStatus.YES, stop=_stop(job))).job
    assert answered.reason != SILENT
    assert answered.state in (job.state, JobState.RUNNING)


def _stop(job: Job) -> Stop | None:
    return None if job.stop_request is None else expected_stop(job)


def test_condition_is_the_reason_while_it_lasts() -> None:
    stalled = step(live(), Observation(ALIVE, WorkerStatus.YES, condition=STALLED)).job
    assert (stalled.state, stalled.reason, stalled.waits_for) == (JobState.RUNNING, STALLED, STALLED)
    again = step(stalled, Observation(ALIVE, WorkerStatus.YES)).job
    assert (again.reason, again.waits_for) == (None, None)


def test_recovering_job_reports_capacity_wait_and_then_the_loss_again() -> None:
    lost, room = Reason(Code.HOST_LOST, "host node3 was lost"), Reason(Code.CAPACITY, "waits for 2 CPU")
    recovering = step(live(), Observation(ALIVE, WorkerStatus.LOST, loss_reason=lost)).job
    waits = step(recovering, Observation(ALIVE, WorkerStatus.LOST, loss_reason=lost, condition=room)).job
    assert (waits.state, waits.reason, waits.waits_for) == (JobState.RECOVERING, room, room)
    assert step(waits, Observation(ALIVE, WorkerStatus.LOST, loss_reason=lost)).job.reason == lost


outcomes = st.builds(
    Outcome,
    result=st.sampled_from(["succeeded", "paused", "cancelled", "resized", "failed"]),
    retryable=st.booleans(),
)
sightings = st.builds(
    Observation,
    submission=st.sampled_from(SubmissionStatus),
    training=st.sampled_from(WorkerStatus),
    outcome=st.none() | outcomes,
    stop=st.none() | st.just(expected_stop(cancelling())) | st.just(expected_stop(pausing())),
    committed=st.none() | st.integers(0, 30),
    condition=st.none() | st.just(STALLED),
    group_up=st.booleans(),
)
stopping = [cancelling(), cancelling(submitted=False), pausing(), pausing(submitted=False), pausing(by=Code.PREEMPTED)]
jobs = st.sampled_from([a_job(), *stopping]) | st.builds(
    live,
    st.sampled_from([JobState.STARTING, JobState.RUNNING, JobState.RECOVERING]),
    submitted=st.booleans(),
    attempt=st.integers(1, 3),
)


@given(jobs, sightings)
def test_unknown_submission_changes_nothing(job: Job, seen: Observation) -> None:
    if job.attempts:
        assert step(job, replace(seen, submission=SubmissionStatus.UNKNOWN, outcome=None)).job == job


@given(jobs, sightings, outcomes)
def test_outcome_counts_without_confirmation_by_the_cluster(job: Job, seen: Observation, outcome: Outcome) -> None:
    if job.attempts:
        found = [step(job, replace(seen, submission=s, outcome=outcome)).job for s in (ALIVE, SubmissionStatus.UNKNOWN)]
        assert found[0] == found[1]


@given(jobs, st.lists(sightings, max_size=12))
def test_any_history_has_legal_transitions_and_one_live_attempt(job: Job, history: list[Observation]) -> None:
    for passed, seen in enumerate(history):
        after = step(job, seen, now=NOW + 60 * passed).job
        assert after.state is job.state or after.state in TRANSITIONS[job.state]
        assert sum(attempt.ended_at is None for attempt in after.attempts) <= 1
        assert len(after.failures) <= after.spec.failure.max_attempts
        assert not (after.state.terminal and any(attempt.ended_at is None for attempt in after.attempts))
        job = after


@given(sightings, st.sampled_from([state for state in JobState if state.terminal]))
def test_terminal_job_never_changes(seen: Observation, state: JobState) -> None:
    job = replace(live(), state=state)
    assert step(job, seen) == Decision(job)
