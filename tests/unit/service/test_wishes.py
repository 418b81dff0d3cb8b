"""Pause, resume and cancel, at any moment and again."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.jobs.commands import cancelled, paused, resumed
from service.domain.jobs.job import Job, JobState
from service.domain.jobs.reason import Code
from service.domain.jobs.transitions import make_room, start
from service.domain.queue.entry import Ticket
from service.errors import IllegalState
from tests.support.service import a_job
from train_loop.spec import ScalingSpec

NOW = 100.0
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def in_state(state: JobState) -> Job:
    """A job that came to a state as jobs do."""
    if state is JobState.QUEUED:
        return a_job()
    job = replace(start(a_job(), now=1.0), state=JobState.RUNNING)
    if state is JobState.CANCELLING:
        return cancel(job)
    if state is JobState.PAUSING:
        return pause(job)
    if state is JobState.PAUSED:
        return pause(job).end_attempt("paused", now=2.0).move(JobState.PAUSED, now=2.0)
    return replace(job, state=state)


def cancel(job: Job, *, grace: float = 60.0) -> Job:
    return cancelled(job, deadline=NOW + grace, checkpoint=True, now=NOW)


def pause(job: Job, *, grace: float = 600.0) -> Job:
    return paused(job, deadline=NOW + grace, now=NOW)


def resume(job: Job, scaling: ScalingSpec | None = None) -> Job:
    return resumed(job, scaling, deadline=NOW + 600.0, now=NOW)


@pytest.mark.parametrize("state", [state for state in JobState if state not in ENDED])
def test_everything_that_lives_can_be_cancelled(state: JobState) -> None:
    job = cancel(in_state(state))
    assert (job.state, job.wish and job.wish.mode) == (JobState.CANCELLING, "cancel")
    assert cancel(job) == job


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
def test_what_waits_or_runs_can_be_paused(state: JobState) -> None:
    job = pause(in_state(state))
    assert (job.state, job.wish and job.wish.reason.code) == (JobState.PAUSING, Code.USER)
    assert pause(job) == job


@pytest.mark.parametrize("wish", [pause, resume])
@pytest.mark.parametrize("state", [*ENDED, JobState.CANCELLING])
def test_what_has_ended_or_will_is_neither_paused_nor_resumed(state: JobState, wish: Callable[[Job], Job]) -> None:
    with pytest.raises(IllegalState, match=f"job-1 is {state} and cannot be .*; clone it"):
        wish(in_state(state))


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_what_has_ended_cannot_be_cancelled(state: JobState) -> None:
    with pytest.raises(IllegalState, match="nothing needs to be done"):
        cancel(in_state(state))


def test_asked_again_there_is_only_less_time() -> None:
    job = pause(in_state(JobState.RUNNING), grace=50)
    found = [pause(job, grace=grace).wish for grace in (5, 500)]
    assert [wish and wish.deadline for wish in found] == [NOW + 5, NOW + 50]


def test_resume_before_the_pause_is_over_is_done_after_it_unless_it_is_taken_back() -> None:
    job = resume(pause(in_state(JobState.RUNNING)))
    assert job.state is JobState.PAUSING
    assert job.wish is not None
    assert job.wish.then_resume
    assert resume(job) == job
    assert pause(job) == pause(in_state(JobState.RUNNING))


def test_resumed_job_is_back_in_the_queue_and_asked_for_nothing() -> None:
    job = resume(in_state(JobState.PAUSED))
    assert (job.state, job.wish, job.reason) == (JobState.QUEUED, None, None)
    assert resume(job) == job


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
def test_resume_of_what_goes_on_anyway_changes_nothing(state: JobState) -> None:
    job = in_state(state)
    assert resume(job) == job


def test_another_size_counts_from_the_next_attempt_on() -> None:
    four = ScalingSpec(num_workers=4)
    job = resume(in_state(JobState.PAUSED), four)
    assert (job.size, job.spec.scaling.world, job.attempts[-1].workers) == (four, 2, 2)
    assert start(job, now=NOW).attempts[-1].workers == 4
    assert resume(in_state(JobState.PAUSING), four).size == four
    running = resume(in_state(JobState.RUNNING), four)
    assert (running.state, running.wish and running.wish.mode) == (JobState.PAUSING, "resize")


def test_room_that_is_held_is_that_of_what_runs_whatever_size_comes_next() -> None:
    job = resume(in_state(JobState.PAUSING), ScalingSpec(num_workers=1))
    assert (job.size.world, Ticket.of(job).scaling.world) == (1, 2)


def test_user_who_pauses_what_made_room_keeps_it_paused() -> None:
    leaving = make_room(in_state(JobState.RUNNING), whom="job-9", deadline=NOW + 30, now=NOW)
    left = leaving.end_attempt("paused", now=NOW).move(JobState.PAUSED, now=NOW, reason=leaving.reason)
    for job in (leaving, left):
        held = pause(job)
        assert held.state is job.state
        assert held.wish is not None
        assert held.wish.reason.code is Code.USER
        assert held.reason == held.wish.reason


@given(st.lists(st.sampled_from([cancel, pause, resume]), max_size=8), st.sampled_from(JobState))
def test_any_order_of_wishes_is_legal_or_told(wishes: list[Callable[[Job], Job]], state: JobState) -> None:
    job = in_state(state)
    for wish in wishes:
        try:
            after = wish(job)
        except IllegalState:
            continue
        assert wish(after) == after
        job = after
