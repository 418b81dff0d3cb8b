"""Pause, resume and cancel requests in every state, also repeated."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.jobs.commands import request_cancel, request_pause, request_resume
from service.domain.jobs.job import Job, JobSize, JobState
from service.domain.jobs.reason import Code
from service.domain.jobs.transitions import preempt, start
from service.domain.queue.entry import QueueEntry
from service.errors import IllegalState
from tests.support.fakes.service import a_job
from train_loop.spec import MEMORY, ScalingSpec

NOW = 100.0
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def in_state(state: JobState) -> Job:
    """Return a job in `state`, with the attempts and the stop request that belong to it."""
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
    return request_cancel(job, deadline=NOW + grace, checkpoint=True, now=NOW)


def pause(job: Job, *, grace: float = 600.0) -> Job:
    return request_pause(job, deadline=NOW + grace, now=NOW)


def resume(job: Job, scaling: ScalingSpec | None = None) -> Job:
    return request_resume(job, None if scaling is None else JobSize(scaling), deadline=NOW + 600.0, now=NOW)


@pytest.mark.parametrize("state", [state for state in JobState if state not in ENDED])
def test_live_job_can_be_cancelled(state: JobState) -> None:
    job = cancel(in_state(state))
    assert (job.state, job.stop_request and job.stop_request.mode) == (JobState.CANCELLING, "cancel")
    assert cancel(job) == job


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
def test_queued_or_active_job_can_be_paused(state: JobState) -> None:
    job = pause(in_state(state))
    assert (job.state, job.stop_request and job.stop_request.reason.code) == (JobState.PAUSING, Code.USER)
    assert pause(job) == job


@pytest.mark.parametrize("request_change", [pause, resume])
@pytest.mark.parametrize("state", [*ENDED, JobState.CANCELLING])
def test_ended_or_cancelling_job_is_neither_paused_nor_resumed(
    state: JobState, request_change: Callable[[Job], Job]
) -> None:
    with pytest.raises(IllegalState, match=f"job-1 is {state} and cannot be .*; clone it"):
        request_change(in_state(state))


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_ended_job_cannot_be_cancelled(state: JobState) -> None:
    with pytest.raises(IllegalState, match="nothing needs to be done"):
        cancel(in_state(state))


def test_repeated_pause_can_only_shorten_the_deadline() -> None:
    job = pause(in_state(JobState.RUNNING), grace=50)
    found = [pause(job, grace=grace).stop_request for grace in (5, 500)]
    assert [stop and stop.deadline for stop in found] == [NOW + 5, NOW + 50]


def test_resume_during_a_pause_follows_it_unless_paused_again() -> None:
    job = resume(pause(in_state(JobState.RUNNING)))
    assert job.state is JobState.PAUSING
    assert job.stop_request is not None
    assert job.stop_request.then_resume
    assert resume(job) == job
    assert pause(job) == pause(in_state(JobState.RUNNING))


def test_resumed_job_is_queued_without_a_stop_request() -> None:
    job = resume(in_state(JobState.PAUSED))
    assert (job.state, job.stop_request, job.reason) == (JobState.QUEUED, None, None)
    assert resume(job) == job


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
def test_resume_of_active_job_changes_nothing(state: JobState) -> None:
    job = in_state(state)
    assert resume(job) == job


def test_new_scaling_applies_from_the_next_attempt() -> None:
    four = ScalingSpec(num_workers=4)
    job = resume(in_state(JobState.PAUSED), four)
    assert (job.size, job.spec.scaling.world, job.attempts[-1].workers) == (four, 2, 2)
    assert start(job, now=NOW).attempts[-1].workers == 4
    assert resume(in_state(JobState.PAUSING), four).size == four
    running = resume(in_state(JobState.RUNNING), four)
    assert (running.state, running.stop_request and running.stop_request.mode) == (JobState.PAUSING, "resize")


def test_resume_of_a_paused_job_at_its_size_takes_the_memory_of_the_host_today() -> None:
    paused, running = (replace(in_state(state), memory={2: 5}) for state in (JobState.PAUSED, JobState.RUNNING))
    size = JobSize(paused.requested_scaling, memory={2: 3})
    assert request_resume(paused, size, deadline=NOW, now=NOW).size.resources_per_worker[MEMORY] == 3
    assert request_resume(running, size, deadline=NOW, now=NOW) == running


def test_held_resources_are_those_of_the_current_attempt() -> None:
    job = resume(in_state(JobState.PAUSING), ScalingSpec(num_workers=1))
    assert (job.size.world, QueueEntry.of(job).scaling.world) == (1, 2)


def test_user_pause_of_a_preempted_job_keeps_it_paused() -> None:
    leaving = preempt(in_state(JobState.RUNNING), whom="job-9", deadline=NOW + 30, now=NOW)
    left = leaving.end_attempt("paused", now=NOW).move(JobState.PAUSED, now=NOW, reason=leaving.reason)
    for job in (leaving, left):
        held = pause(job)
        assert held.state is job.state
        assert held.stop_request is not None
        assert held.stop_request.reason.code is Code.USER
        assert held.reason == held.stop_request.reason


@given(st.lists(st.sampled_from([cancel, pause, resume]), max_size=8), st.sampled_from(JobState))
def test_any_sequence_of_requests_is_legal_or_raises_illegal_state(
    requests: list[Callable[[Job], Job]], state: JobState
) -> None:
    job = in_state(state)
    for request_change in requests:
        try:
            after = request_change(job)
        except IllegalState:
            continue
        assert request_change(after) == after
        job = after
