"""Every rule by which a job pauses or is cancelled."""

from dataclasses import replace

import pytest

from service.domain.jobs.decide import Decision, Effect, Seen, Submission
from service.domain.jobs.job import Job, JobState, Wish
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.transitions import make_room, start, stop_with_service
from tests.support.attempts import ALIVE, NOW, asked, cancelling, live, pausing, said, step
from tests.support.service import a_job
from train_loop.run_dir import Outcome, Stop


def test_cancel_before_any_attempt_ends_at_once() -> None:
    job = replace(a_job(), state=JobState.CANCELLING, wish=Wish("cancel", checkpoint=True, deadline=200.0))
    assert step(job, Seen()).job.state is JobState.CANCELLED


def test_cancel_before_the_submit_never_submits() -> None:
    job = cancelling(submitted=False)
    first = step(job, Seen(Submission.MISSING))
    done = step(job, Seen(Submission.MISSING, stop=asked(job)))
    assert (first.effects, done.effects) == ((Effect.ASK_TO_STOP,), (Effect.FENCE_OFF,))
    assert done.job.state is JobState.CANCELLED


def test_cancel_asks_the_loop_once_and_waits_for_its_answer() -> None:
    job = cancelling()
    stop = Stop(mode="cancel", checkpoint=True, deadline=200.0, attempt=1)
    assert step(job, Seen(ALIVE)).effects == (Effect.ASK_TO_STOP,)
    assert step(job, Seen(ALIVE, stop=stop)) == Decision(job)
    ended = step(job, Seen(ALIVE, stop=stop, outcome=Outcome(result="cancelled", step=7))).job
    assert (ended.state, ended.attempts[-1].result) == (JobState.CANCELLED, "cancelled")


def test_cancel_ends_the_driver_when_patience_ends() -> None:
    job = cancelling(deadline=150.0)
    seen = Seen(ALIVE, stop=asked(job))
    assert step(job, seen, now=149.0).effects == ()
    assert step(job, seen, now=150.0).effects == (Effect.STOP_NOW,)
    assert step(job, replace(seen, submission=Submission.STOPPED), now=151.0).job.state is JobState.CANCELLED


def test_what_went_wrong_on_the_way_to_a_pause_is_forgotten_when_it_is_over() -> None:
    job = replace(pausing(), reason=Reason(Code.EFFECT_FAILED, "the disk was slow"))
    assert step(job, Seen(ALIVE, outcome=Outcome(result="paused"))).job.reason == Reason(Code.USER, "paused")


def test_pause_is_over_only_when_the_driver_has_said_so() -> None:
    job = pausing()
    assert step(job, Seen(ALIVE)).effects == (Effect.ASK_TO_STOP,)
    assert step(job, Seen(ALIVE, stop=asked(job))) == Decision(job)
    done = step(job, Seen(ALIVE, stop=asked(job), outcome=Outcome(result="paused", step=7), committed=7)).job
    assert (done.state, done.reason) == (JobState.PAUSED, job.reason)
    assert (done.attempts[-1].result, done.attempts[-1].step) == ("paused", 7)
    assert not done.holds_resources


def test_pause_whose_driver_died_says_where_the_run_goes_on() -> None:
    done = step(pausing(), Seen(Submission.FAILED, stop=asked(pausing()), committed=10)).job
    assert done.state is JobState.PAUSED
    assert said(done).endswith("before it saved; the run resumes from step 10)")


def test_pause_of_what_never_ran_is_over_at_once() -> None:
    job = pausing(submitted=False)
    assert step(job, Seen(Submission.MISSING, stop=asked(job))).job.state is JobState.PAUSED
    held = replace(a_job(), state=JobState.PAUSING, wish=pausing().wish)
    assert step(held, Seen()).job.state is JobState.PAUSED


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome(result="succeeded"), JobState.SUCCEEDED),
        (Outcome(result="failed", reason="bad data", code="data_error"), JobState.FAILED),
        (Outcome(result="failed", reason="no disk", code="checkpoint_failed", retryable=True), JobState.PAUSED),
    ],
)
def test_run_that_ends_while_it_is_to_pause_ends_as_it_did(outcome: Outcome, state: JobState) -> None:
    assert step(pausing(), Seen(ALIVE, outcome=outcome)).job.state is state


def test_pause_that_was_taken_back_goes_on_when_it_is_over() -> None:
    job = pausing()
    assert job.wish is not None
    job = replace(job, wish=replace(job.wish, then_resume=True))
    done = step(job, Seen(ALIVE, outcome=Outcome(result="paused"))).job
    assert (done.state, done.wish) == (JobState.QUEUED, None)
    assert JobState.PAUSED in done.times


def test_job_that_saved_for_the_end_of_the_service_is_queued_and_has_not_failed() -> None:
    job = stop_with_service(live(), deadline=200.0, now=NOW)
    assert step(job, Seen(ALIVE)).effects == (Effect.ASK_TO_STOP,)
    done = step(job, Seen(ALIVE, stop=asked(job), outcome=Outcome(result="paused", step=7), committed=7)).job
    assert (done.state, done.attempts[-1].result, done.attempts[-1].step) == (JobState.QUEUED, "service_stopped", 7)
    assert (done.failures, done.wish) == ((), None)


@pytest.mark.parametrize("submission", [Submission.MISSING, Submission.FAILED, Submission.STOPPED])
def test_job_that_did_not_save_before_the_end_of_the_service_has_not_failed_either(submission: Submission) -> None:
    job = stop_with_service(live(), deadline=200.0, now=NOW)
    done = step(job, Seen(submission, stop=asked(job), committed=3), now=500.0).job
    assert (done.state, done.attempts[-1].result, done.failures) == (JobState.QUEUED, "service_stopped", ())


def test_job_that_made_room_starts_again_by_itself() -> None:
    job = make_room(live(), whom="job-9", deadline=200.0, now=NOW)
    paused = step(job, Seen(ALIVE, outcome=Outcome(result="paused"))).job
    assert (paused.state, paused.reason and paused.reason.code) == (JobState.PAUSED, Code.PREEMPTED)
    again = start(paused, now=NOW + 1)
    assert (again.state, again.attempts[-1].submission_id, again.wish) == (JobState.STARTING, "job-1-2", None)


def test_a_stop_is_for_one_attempt() -> None:
    assert asked(pausing()) == Stop(mode="pause", checkpoint=True, deadline=200.0, attempt=1)


def test_a_disk_that_takes_no_stop_file_does_not_keep_a_job_alive_past_its_deadline() -> None:
    job = cancelling()
    assert step(job, Seen(ALIVE), now=NOW).effects == (Effect.ASK_TO_STOP,)
    assert step(job, Seen(ALIVE), now=1e9).effects == (Effect.STOP_NOW,)


@pytest.mark.parametrize("job", [cancelling(), pausing()])
def test_stop_without_workers_is_written_and_then_forced_at_once(job: Job) -> None:
    assert step(job, Seen(ALIVE, group_up=False)).effects == (Effect.ASK_TO_STOP, Effect.STOP_NOW)
    assert step(job, Seen(ALIVE, group_up=False, stop=asked(job))).effects == (Effect.STOP_NOW,)
    gone = step(job, Seen(Submission.STOPPED, group_up=False, stop=asked(job), committed=10))
    # We stopped the driver: its end is no failure, even if it had no time to say so.
    assert gone.job.attempts[-1].result in ("cancelled", "paused")
    assert (gone.job.state, gone.effects) == (
        JobState.CANCELLED if job.state is JobState.CANCELLING else JobState.PAUSED,
        (Effect.FENCE_OFF,),
    )
