"""Rules of decide for pausing and cancelling a job."""

from dataclasses import replace

import pytest

from service.domain.jobs.condition import RESUMES
from service.domain.jobs.decision import Decision, Effect
from service.domain.jobs.job import Job, JobState, StopRequest
from service.domain.jobs.observation import Observation, SubmissionStatus, WorkerStatus
from service.domain.jobs.reason import Code, Reason, describe_exit
from service.domain.jobs.transitions import preempt, start, stop_with_service
from tests.support.builders.attempts import ALIVE, NOW, cancelling, expected_stop, live, pausing, reason_message, step
from tests.support.fakes.service import a_job
from train_loop.run_dir import Outcome, Stop


def test_cancel_before_any_attempt_ends_at_once() -> None:
    job = replace(
        a_job(), state=JobState.CANCELLING, stop_request=StopRequest("cancel", checkpoint=True, deadline=200.0)
    )
    assert step(job, Observation()).job.state is JobState.CANCELLED


def test_cancel_before_submission_never_submits() -> None:
    job = cancelling(submitted=False)
    first = step(job, Observation(SubmissionStatus.MISSING))
    done = step(job, Observation(SubmissionStatus.MISSING, stop=expected_stop(job)))
    assert (first.effects, done.effects) == ((Effect.ASK_TO_STOP,), (Effect.FENCE_OFF,))
    assert done.job.state is JobState.CANCELLED


def test_cancel_requests_stop_once_and_waits_for_outcome() -> None:
    job = cancelling()
    stop = Stop(mode="cancel", checkpoint=True, deadline=200.0, attempt=1)
    assert step(job, Observation(ALIVE)).effects == (Effect.ASK_TO_STOP,)
    waits = step(job, Observation(ALIVE, stop=stop, waits_for="the workers since 00:01:40 UTC"))
    assert (waits.effects, waits.job.state) == ((), JobState.CANCELLING)
    message = "a user asked for it; waits for the workers since 00:01:40 UTC, until 00:03:20 UTC at the latest"
    assert reason_message(waits.job) == message
    ended = step(job, Observation(ALIVE, stop=stop, outcome=Outcome(result="cancelled", step=7))).job
    assert (ended.state, ended.attempts[-1].result) == (JobState.CANCELLED, "cancelled")


@pytest.mark.parametrize(("job", "command"), [(cancelling(), "cancel"), (pausing(), "pause")])
def test_stop_that_waits_for_a_hanging_rank_names_it_and_the_command_that_ends_it(job: Job, command: str) -> None:
    hang = Reason(Code.STALLED, "step 7 has made no progress for 12 s: rank 0 waits for rank 1 on node3")
    waits = step(job, Observation(ALIVE, stop=expected_stop(job), condition=hang)).job
    message = f"{hang.message}; the {command} waits until 00:03:20 UTC at the latest"
    remedy = f"to stop without a new checkpoint: trainshed {command} JOB --grace 0"
    assert waits.reason == replace(hang, message=message, remedy=remedy)


@pytest.mark.parametrize("job", [cancelling(), pausing()])
def test_stop_does_not_wait_for_capacity(job: Job) -> None:
    no_room = Reason(Code.CAPACITY, "waits for 2 CPU", "add a node")
    waits = step(job, Observation(ALIVE, WorkerStatus.LOST, stop=expected_stop(job), condition=no_room)).job
    assert waits.reason is not None
    assert waits.reason.code is Code.USER, "the driver ends as soon as it reads the request"


def test_cancel_stops_driver_at_deadline() -> None:
    job = cancelling(deadline=150.0)
    seen = Observation(ALIVE, stop=expected_stop(job))
    assert step(job, seen, now=149.0).effects == ()
    assert step(job, seen, now=150.0).effects == (Effect.STOP_NOW,)
    assert step(job, replace(seen, submission=SubmissionStatus.STOPPED), now=151.0).job.state is JobState.CANCELLED


def test_stop_without_a_grace_period_is_requested_before_the_driver_is_stopped() -> None:
    job = cancelling(deadline=NOW)
    # The driver must not report that nobody has asked.
    both = step(job, Observation(ALIVE, observed=True))
    assert (both.effects, both.needed) == ((Effect.ASK_TO_STOP, Effect.STOP_NOW), False)
    assert step(job, Observation(ALIVE)).effects == (Effect.STOP_NOW,), "its storage cannot be read"
    asked = Observation(ALIVE, stop=expected_stop(job), observed=True)
    assert step(job, asked).effects == (Effect.STOP_NOW,)


def test_finished_pause_replaces_reason_of_earlier_failure() -> None:
    job = replace(pausing(), reason=Reason(Code.EFFECT_FAILED, "the disk was slow"))
    assert step(job, Observation(ALIVE, outcome=Outcome(result="paused"))).job.reason == Reason(Code.USER, "paused")


def test_pause_finishes_only_with_an_outcome_of_the_driver() -> None:
    job = pausing()
    assert step(job, Observation(ALIVE)).effects == (Effect.ASK_TO_STOP,)
    assert step(job, Observation(ALIVE, stop=expected_stop(job))) == Decision(job)
    done = step(
        job, Observation(ALIVE, stop=expected_stop(job), outcome=Outcome(result="paused", step=7), committed=7)
    ).job
    assert (done.state, done.reason) == (JobState.PAUSED, job.reason)
    assert (done.attempts[-1].result, done.attempts[-1].step) == ("paused", 7)
    assert not done.holds_resources


LOSS = Reason(Code.WORKERS_LOST, "rank 1 on a was killed by signal 9 (SIGKILL)" + RESUMES)
KILLED = "it was killed by signal 9 (SIGKILL), exit code -9"


@pytest.mark.parametrize("committed", [None, 10])
@pytest.mark.parametrize(
    ("seen", "late", "cause"),
    [
        (
            Observation(SubmissionStatus.FAILED, driver_end=KILLED, has_output=True),
            False,
            f"the driver was lost: {KILLED} before it saved",
        ),
        (
            Observation(SubmissionStatus.MISSING, driver_end="Ray does not know it any more", has_output=True),
            False,
            "the driver was lost: Ray does not know it any more before it saved",
        ),
        (
            Observation(SubmissionStatus.FAILED, WorkerStatus.LOST, loss_reason=LOSS, has_output=True),
            False,
            "rank 1 on a was killed by signal 9 (SIGKILL) before it saved",
        ),
        (
            # The group was lost earlier, and its successor trained.
            Observation(SubmissionStatus.STOPPED, WorkerStatus.YES, loss_reason=LOSS, has_output=True),
            True,
            "stopped at the deadline before it saved",
        ),
        (Observation(SubmissionStatus.STOPPED, has_output=True), False, "stopped before it saved"),
        (Observation(SubmissionStatus.STOPPED), False, "stopped before its driver had started"),
    ],
)
@pytest.mark.parametrize("job", [cancelling(), pausing()])
def test_stop_without_outcome_names_its_cause_and_the_newest_checkpoint(
    job: Job, seen: Observation, late: bool, cause: str, committed: int | None
) -> None:
    seen = replace(seen, stop=expected_stop(job), committed=committed, observed=True)
    assert job.stop_request is not None
    done = step(job, seen, now=job.stop_request.deadline if late else NOW).job
    assert done.state is (JobState.CANCELLED if job.state is JobState.CANCELLING else JobState.PAUSED)
    newest = "there is no checkpoint" if committed is None else "the newest checkpoint is of step 10"
    assert reason_message(done) == f"{job.stop_request.reason.message} ({cause}; {newest})"
    assert done.attempts[-1].step == committed


@pytest.mark.parametrize("submission", [SubmissionStatus.MISSING, SubmissionStatus.FAILED])
@pytest.mark.parametrize(("job", "result"), [(cancelling(), "cancelled"), (pausing(), "paused")])
def test_planned_end_of_the_head_during_a_stop_is_named_and_not_a_failure(
    job: Job, result: str, submission: SubmissionStatus
) -> None:
    """The head adds its reason to the request of the service, which does not replace it."""
    noticed = expected_stop(job).model_copy(update={"reason": "the head ends as planned"})
    assert step(job, Observation(ALIVE, stop=noticed)).effects == ()
    done = step(job, Observation(submission, stop=noticed, committed=10, observed=True, has_output=True)).job
    assert (done.failures, done.attempts[-1].result) == ((), result)
    assert job.stop_request is not None
    assert reason_message(done) == (
        f"{job.stop_request.reason.message} (the head ends as planned; the driver was ended before it had saved; "
        "the newest checkpoint is of step 10)"
    )
    # The service has stopped the driver, which adds a notice when it gets the signal.
    stopped = step(job, Observation(SubmissionStatus.STOPPED, stop=noticed, observed=True, has_output=True)).job
    assert reason_message(stopped) == (
        f"{job.stop_request.reason.message} (stopped before it saved; there is no checkpoint)"
    )
    # A request that the head made itself is not the service's.
    own = Stop(mode="pause", attempt=1, reason="the head ends as planned")
    assert step(job, Observation(ALIVE, stop=own)).effects == (Effect.ASK_TO_STOP,)


@pytest.mark.parametrize(
    ("submission", "result"),
    [
        (SubmissionStatus.SUCCEEDED, "paused"),
        (SubmissionStatus.STOPPED, "paused"),
        (SubmissionStatus.FAILED, "failed"),
        (SubmissionStatus.MISSING, "failed"),
    ],
)
def test_stop_whose_storage_cannot_be_read_claims_nothing_about_its_end(
    submission: SubmissionStatus, result: str
) -> None:
    job = pausing()
    assert job.stop_request is not None
    done = step(job, Observation(submission), now=job.stop_request.deadline).job
    unread = "its storage cannot be read, so its last outcome is not known"
    assert (done.state, done.attempts[-1].result) == (JobState.PAUSED, result)
    assert reason_message(done) == f"paused ({unread}, nor is its newest checkpoint)"
    failure = done.attempts[-1].reason
    assert (failure and failure.message) == (unread if result == "failed" else None)


def test_failure_reported_during_a_stop_names_the_newest_checkpoint() -> None:
    lost = Outcome(result="failed", code="worker_failure", reason="rank 1 was killed", retryable=True)
    done = step(pausing(), Observation(ALIVE, outcome=lost, committed=10)).job
    assert reason_message(done) == "paused (rank 1 was killed; the newest checkpoint is of step 10)"
    # The driver names it, too, if it has ended the attempt.
    named = lost.model_copy(update={"reason": "rank 1 was killed; the newest checkpoint is of step 10"})
    assert reason_message(step(pausing(), Observation(ALIVE, outcome=named, committed=10)).job) == reason_message(done)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "it was killed by signal 9 (SIGKILL), exit code -9"),
        (137, "it was killed by signal 9 (SIGKILL), exit code 137"),
        (-15, "it was killed by signal 15 (SIGTERM), exit code -15"),
        (1, "it ended with exit code 1"),
        (0, "it ended with exit code 0"),
        (255, "it ended with exit code 255"),
    ],
)
def test_exit_code_is_described(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_pause_of_job_that_never_ran_is_immediate() -> None:
    job = pausing(submitted=False)
    assert step(job, Observation(SubmissionStatus.MISSING, stop=expected_stop(job))).job.state is JobState.PAUSED
    held = replace(a_job(), state=JobState.PAUSING, stop_request=pausing().stop_request)
    assert step(held, Observation()).job.state is JobState.PAUSED


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome(result="succeeded"), JobState.SUCCEEDED),
        (Outcome(result="failed", reason="bad data", code="data_error"), JobState.FAILED),
        (Outcome(result="failed", reason="no disk", code="checkpoint_failed", retryable=True), JobState.PAUSED),
    ],
)
def test_outcome_during_pause_determines_the_state(outcome: Outcome, state: JobState) -> None:
    assert step(pausing(), Observation(ALIVE, outcome=outcome)).job.state is state


def test_pause_with_then_resume_queues_the_job_afterwards() -> None:
    job = pausing()
    assert job.stop_request is not None
    job = replace(job, stop_request=replace(job.stop_request, then_resume=True))
    done = step(job, Observation(ALIVE, outcome=Outcome(result="paused"))).job
    assert (done.state, done.stop_request) == (JobState.QUEUED, None)
    assert JobState.PAUSED in done.times


def test_job_saved_before_service_stop_is_queued_without_failure() -> None:
    job = stop_with_service(live(), deadline=200.0, now=NOW)
    assert step(job, Observation(ALIVE)).effects == (Effect.ASK_TO_STOP,)
    done = step(
        job, Observation(ALIVE, stop=expected_stop(job), outcome=Outcome(result="paused", step=7), committed=7)
    ).job
    assert (done.state, done.attempts[-1].result, done.attempts[-1].step) == (JobState.QUEUED, "service_stopped", 7)
    assert (done.failures, done.stop_request) == ((), None)


@pytest.mark.parametrize("submission", [SubmissionStatus.MISSING, SubmissionStatus.FAILED, SubmissionStatus.STOPPED])
def test_job_unsaved_at_service_stop_is_queued_without_failure(submission: SubmissionStatus) -> None:
    job = stop_with_service(live(), deadline=200.0, now=NOW)
    done = step(job, Observation(submission, stop=expected_stop(job), committed=3), now=500.0).job
    assert (done.state, done.attempts[-1].result, done.failures) == (JobState.QUEUED, "service_stopped", ())


def test_preempted_job_starts_again_without_a_request() -> None:
    job = preempt(live(), whom="job-9", deadline=200.0, now=NOW)
    paused = step(job, Observation(ALIVE, outcome=Outcome(result="paused"))).job
    assert (paused.state, paused.reason and paused.reason.code) == (JobState.PAUSED, Code.PREEMPTED)
    again = start(paused, now=NOW + 1)
    assert (again.state, again.attempts[-1].submission_id, again.stop_request) == (JobState.STARTING, "job-1-2", None)


def test_stop_names_its_attempt() -> None:
    assert expected_stop(pausing()) == Stop(mode="pause", checkpoint=True, deadline=200.0, attempt=1)


def test_unwritten_stop_file_does_not_delay_forced_stop_past_deadline() -> None:
    job = cancelling()
    assert step(job, Observation(ALIVE), now=NOW).effects == (Effect.ASK_TO_STOP,)
    assert step(job, Observation(ALIVE), now=1e9).effects == (Effect.STOP_NOW,)


@pytest.mark.parametrize("job", [cancelling(), pausing()])
@pytest.mark.parametrize(
    ("submission", "has_output", "seconds", "stops"),
    [
        (SubmissionStatus.PENDING, False, 0.0, True),
        # No driver that reads the request has begun.
        (SubmissionStatus.RUNNING, False, 0.0, True),
        (SubmissionStatus.RUNNING, True, 4.9, False),
        (SubmissionStatus.RUNNING, True, 5.0, True),
    ],
)
def test_driver_without_workers_is_stopped_if_it_does_not_end_by_itself(
    job: Job, submission: SubmissionStatus, has_output: bool, seconds: float, stops: bool
) -> None:
    job = replace(job, times={job.state: NOW - seconds})
    seen = Observation(submission, group_up=False, has_output=has_output)
    forced = (Effect.STOP_NOW,) if stops else ()
    assert step(job, seen).effects == (Effect.ASK_TO_STOP, *forced)
    assert step(job, replace(seen, stop=expected_stop(job))).effects == forced
    gone = step(job, replace(seen, submission=SubmissionStatus.STOPPED, stop=expected_stop(job), committed=10))
    # The service stopped the driver: an attempt without an outcome has not failed.
    assert gone.job.attempts[-1].result in ("cancelled", "paused")
    assert gone.effects == (Effect.FENCE_OFF,)
