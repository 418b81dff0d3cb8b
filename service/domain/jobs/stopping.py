"""The rules of jobs that pause or are cancelled. Pure."""

from service.domain.jobs.decision import NO_FAILURE, Decision, Effect, Retry, with_outage, with_reason
from service.domain.jobs.explain import (
    UNREAD,
    began,
    driver_loss,
    newest_checkpoint,
    planned_end_notice,
    reported_failure,
    stop_reason,
    wait_of_stop,
    why_unsaved,
)
from service.domain.jobs.job import Attempt, Job, JobState, StopRequest
from service.domain.jobs.observation import Observation, SubmissionStatus
from service.domain.jobs.reason import Code
from service.domain.jobs.transitions import resume
from train_loop.run_dir import Outcome, Stop

_OWN_END_SECONDS = 5.0
"""Seconds in which a driver without workers must end before it is killed."""


def wanted_stop(stop_request: StopRequest, attempt: Attempt) -> Stop:
    """Return the content that control/stop.json should have."""
    return Stop(
        mode=stop_request.mode,
        checkpoint=stop_request.checkpoint,
        deadline=stop_request.deadline,
        attempt=attempt.number,
    )


def decide_stop(job: Job, seen: Observation, now: float, retry: Retry) -> Decision:
    """Decide about a job that pauses or is cancelled: ask the loop to stop; after the deadline, stop the driver."""
    attempt, stop_request = job.attempt, job.stop_request
    if attempt is None or attempt.ended_at is not None or stop_request is None:
        # Without the reason of an effect that failed in between.
        return Decision(_finish_stop(with_reason(job, stop_reason(job, None)), now))
    if seen.outcome is not None:
        return Decision(_stop_with_outcome(job, seen.outcome, committed=seen.committed, now=now))
    late = now >= stop_request.deadline
    # The stop file is written before anything else, so that a driver that is starting finds it, too.
    stop_now = (Effect.STOP_NOW,) if seen.submission.alive and (late or _is_stuck(job, seen, now)) else ()
    if not _is_asked(seen.stop, wanted_stop(stop_request, attempt)) and (not late or (stop_now and seen.observed)):
        # After the deadline, storage that cannot be written to must not keep the driver alive.
        return Decision(job, (Effect.ASK_TO_STOP, *stop_now), needed=not late)
    if seen.submission is SubmissionStatus.UNKNOWN:
        return Decision(with_outage(job, seen))
    if not seen.submission.alive:
        return Decision(_stop_without_outcome(job, seen, now))
    return Decision(with_reason(job, wait_of_stop(stop_request, seen)), stop_now)


def _is_asked(stop: Stop | None, wanted: Stop) -> bool:
    """Return whether a request is the wanted one; a head that ends as planned adds its reason."""
    return stop is not None and stop.model_copy(update={"reason": None}) == wanted


def _is_stuck(job: Job, seen: Observation, now: float) -> bool:
    """Return whether a driver without workers must be stopped from outside.

    A driver ends by itself in each phase in which no worker reads the request, unless it has not started or hangs. A
    group that starts meanwhile finds the stop file, and the fence once the driver has ended.
    """
    if seen.group_up:
        return False
    return not seen.has_output or now - job.times.get(job.state, now) >= _OWN_END_SECONDS


def _stop_with_outcome(job: Job, outcome: Outcome, *, committed: int | None, now: float) -> Job:
    """Return the job after its driver has written an outcome and its workers have ended."""
    reason = reported_failure(outcome) if outcome.result == "failed" else None
    message, newest = outcome.reason, newest_checkpoint(committed)
    if reason is not None and not str(message).endswith(newest):
        message = f"{message}; {newest}"
    result = "service_stopped" if outcome.result == "paused" and _service_stops(job) else outcome.result
    job = job.end_attempt(result, now=now, reason=reason, step=committed)
    if job.state is JobState.PAUSING and outcome.result == "succeeded":
        return job.move(JobState.SUCCEEDED, now=now)
    if job.state is JobState.PAUSING and outcome.result == "failed" and not outcome.retryable:
        return job.move(JobState.FAILED, now=now, reason=reason)
    return _finish_stop(with_reason(job, stop_reason(job, message)), now)


def _stop_without_outcome(job: Job, seen: Observation, now: float) -> Job:
    """Return the job after its driver ended without an outcome, or never started."""
    attempt, request = job.attempts[-1], job.stop_request
    assert request is not None, "a job that stops has a request"
    failure = None
    if job.state is JobState.CANCELLING:
        result = "cancelled"
    elif _service_stops(job):
        # The deadline passed and Ray was stopped: not a failure of the job.
        result = "service_stopped"
    elif planned_end_notice(seen, attempt) or seen.submission in NO_FAILURE or not began(attempt, seen):
        result = wanted_stop(request, attempt).result
    else:
        result, failure = "failed", driver_loss(seen) if seen.observed else UNREAD
    message = why_unsaved(seen, attempt, late=now >= request.deadline) if began(attempt, seen) else None
    job = job.end_attempt(result, now=now, reason=failure, step=seen.committed)
    return _finish_stop(with_reason(job, stop_reason(job, message)), now)


def _service_stops(job: Job) -> bool:
    return job.stop_request is not None and job.stop_request.reason.code is Code.SERVICE_STOPPED


def _finish_stop(job: Job, now: float) -> Job:
    """Return the job once none of its processes run."""
    if job.state is JobState.CANCELLING:
        return job.move(JobState.CANCELLED, now=now, reason=job.reason)
    paused = job.move(JobState.PAUSED, now=now, reason=job.reason)
    return resume(paused, now=now) if job.stop_request is not None and job.stop_request.then_resume else paused
