"""decide(job, seen, now) -> Decision: the state transition rules of a job. Pure.

A decision is the job to store and the side effects to run first. Effects are repeatable: after a crash between effect
and store, the service decides again. `admission` decides for all jobs at once which of them start.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from service.domain.jobs.decision import Decision, Effect, Retry, with_outage, with_reason
from service.domain.jobs.explain import (
    crash_loop,
    driver_loss,
    hang,
    last_end,
    planned_end_notice,
    reported_failure,
)
from service.domain.jobs.job import Attempt, Job, JobState
from service.domain.jobs.observation import Observation, SubmissionStatus, WorkerStatus
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.stopping import decide_stop
from train_loop.run_dir import Outcome

_SLACK_SECONDS = 60.0
_HEAD_END_SECONDS = 10.0
"""Seconds after an attempt that left a head before the next one: the head ends after its last driver."""
_MOST_MOVE_SECONDS = 300.0
"""Limit of the delay after a move, which doubles with each move in a row without a new checkpoint."""
_MOVES_REMEDY = (
    "find what ends the head, its host or the driver again and again; more frequent checkpoints "
    "(checkpoint.every_seconds) keep more of the work"
)
_NEVER_RAN = "the head of Ray has ended before the driver had started"
_FENCE_SECONDS = 600.0
"""Seconds after a deadline during which writing the fence is retried: a late submission may still start a driver."""


def decide(job: Job, seen: Observation, *, now: float, retry: Retry) -> Decision:
    """Return the next step of a job; the same job if there is nothing to do."""
    rule = _RULES.get(job.state)
    if rule is None:
        return Decision(job)
    if seen.newer is not None:
        # Without effects: if this copy of the job is stale, and not the stored one, the store discards the change.
        return Decision(job.catch_up(seen.newer.attempt, seen.newer.size, now=now))
    return _with_last_effects(job, rule(job, seen, now, retry), now)


def _with_last_effects(job: Job, decision: Decision, now: float) -> Decision:
    """Return a decision with the effects at the end of a job's activity, if it ends that."""
    if decision.job.state in _RULES:
        return decision
    fence = (Effect.FENCE_OFF,) if job.attempts else ()
    release_parent = (Effect.RELEASE_PARENT,) if job.parent is not None and decision.job.state.terminal else ()
    # A disk that stays full must not keep a job alive forever.
    given_up = job.stop_request is not None and now >= job.stop_request.deadline + _FENCE_SECONDS
    return replace(decision, effects=(*decision.effects, *fence, *release_parent), needed=not given_up)


def _active(job: Job, seen: Observation, now: float, retry: Retry) -> Decision:
    """Decide about a job that starts, runs or recovers."""
    attempt = job.attempts[-1]
    # The attempt wrote its outcome itself; the cluster need not confirm it.
    if attempt.ended_at is None and (left := _planned_end(seen, attempt)) is not None:
        return Decision(_end_as_planned(job, left, committed=seen.committed, now=now))
    if attempt.ended_at is None and seen.outcome is not None:
        return Decision(_end_with_outcome(job, seen.outcome, committed=seen.committed, now=now, retry=retry))
    if seen.gone is not None and seen.submission is not SubmissionStatus.UNKNOWN:
        return _without_run_dir(job, seen, seen.gone, now)
    if attempt.ended_at is not None:
        return Decision(job if now < (job.next_attempt_at or 0) else job.begin_attempt(now=now))
    if seen.submission is SubmissionStatus.UNKNOWN:
        return Decision(with_outage(job, seen))
    # An attempt that has written was submitted, even if that is not stored. It is not submitted again: a driver of it
    # that still runs must find a newer fence.
    if _never_ran(seen):
        if attempt.submitted_at is None:
            return _submit(job, seen.previous, now)
        return Decision(_end_as_planned(job, _NEVER_RAN, committed=seen.committed, now=now))
    if not seen.submission.alive:
        return Decision(_fail_attempt(job, driver_loss(seen), committed=seen.committed, now=now, retry=retry))
    if hangs(job, seen.idle_seconds):
        return Decision(
            _fail_attempt(job, hang(seen), committed=seen.committed, now=now, retry=retry), (Effect.STOP_NOW,)
        )
    return Decision(_follow_workers(job if attempt.submitted_at else job.mark_submitted(now=now), seen, now))


def _without_run_dir(job: Job, seen: Observation, gone: Reason, now: float) -> Decision:
    """Decide about a job whose run directory is gone: another attempt would begin at the first step in silence."""
    if job.attempts[-1].ended_at is None and seen.submission.alive and not hangs(job, seen.idle_seconds):
        return Decision(with_reason(job, gone))
    stop_now = (Effect.STOP_NOW,) if seen.submission.alive else ()
    reason = replace(gone, remedy="submit the job again, or clone a job whose checkpoints are kept")
    return Decision(_fail(job, reason, committed=None, now=now), stop_now)


def give_up(job: Job, error: str, *, now: float) -> Decision:
    """End a job whose run directory cannot be used: no retry can help."""
    reason = Reason(Code.USER_ERROR, error, "remove or restore that file, and clone the job from its newest checkpoint")
    return _with_last_effects(job, Decision(_fail(job, reason, committed=None, now=now)), now)


def _fail(job: Job, reason: Reason, *, committed: int | None, now: float) -> Job:
    job = job.end_attempt("failed", now=now, reason=reason, step=committed)
    return job.move(JobState.FAILED, now=now, reason=reason)


def _planned_end(seen: Observation, attempt: Attempt) -> str | None:
    """Return why an attempt has ended if its head or host had asked it to leave; None if it has not, or otherwise."""
    notice = planned_end_notice(seen, attempt)
    if notice is None:
        return None
    resumes = "there is no checkpoint" if seen.committed is None else f"the run resumes from step {seen.committed}"
    if seen.outcome is None:
        ended = seen.submission is not SubmissionStatus.UNKNOWN and not seen.submission.alive
        return f"{notice}; the driver was ended before it had saved; {resumes}" if ended else None
    # Ranks whose pods end first are lost: that is not a fault either.
    left = seen.outcome.result in ("paused", "moved") or (seen.outcome.result == "failed" and seen.outcome.retryable)
    return f"{notice}; {resumes}" if left else None


def _never_ran(seen: Observation) -> bool:
    """Return whether a head that has ended took an attempt with it before the attempt began."""
    return seen.submission is SubmissionStatus.MISSING and not seen.has_output


def _end_as_planned(job: Job, message: str, *, committed: int | None, now: float) -> Job:
    """End the newest attempt, which does not count as a failure. The next one starts once the old head has ended."""
    return _move_on(job, message, committed=committed, now=now, at_least=_HEAD_END_SECONDS)


def _move_on(job: Job, message: str, *, committed: int | None, now: float, at_least: float = 0.0) -> Job:
    """End the newest attempt as moved. Moves in a row without a new checkpoint delay the next attempt more and more.

    Something may end the attempts again and again. They never count as failures, so the delay limits what they cost.
    """
    in_vain, delay = job.end_attempt("moved", now=now, step=committed).moves_in_vain, at_least
    reason = Reason(Code.MOVING, message)
    if in_vain > 1:
        delay = min(_HEAD_END_SECONDS * 2.0 ** min(in_vain - 1, 30), _MOST_MOVE_SECONDS)
        row = f"{in_vain} attempts in a row ended this way without a new checkpoint"
        reason = replace(reason, message=f"{message}; {row}, so the next one waits {delay:.0f} s", remedy=_MOVES_REMEDY)
    # The attempt keeps the reason: soon the job's own is that Ray does not answer.
    job = job.end_attempt("moved", now=now, reason=reason, step=committed)
    job = job.move(JobState.RECOVERING, now=now) if job.state is JobState.RUNNING else job
    return replace(job, reason=reason, next_attempt_at=now + delay)


def _submit(job: Job, previous: SubmissionStatus, now: float) -> Decision:
    # Two live drivers would share a run directory. The fence protects it, but the work of one driver would be wasted.
    if previous.alive:
        return Decision(job, (Effect.STOP_PREVIOUS,))
    if previous is SubmissionStatus.UNKNOWN:
        return Decision(job)
    return Decision(with_reason(job.mark_submitted(now=now), last_end(job)), (Effect.SUBMIT,))


def hangs(job: Job, idle_seconds: float) -> bool:
    """Return whether an attempt that was idle for `idle_seconds` hangs. Its workers had time to notice that first."""
    return idle_seconds > job.spec.failure.hang_timeout_seconds * job.spec.run.training.logging_steps + _SLACK_SECONDS


def _follow_workers(job: Job, seen: Observation, now: float) -> Job:
    """Return the job with the state and reason that its live attempt's workers imply."""
    if job.state is JobState.RUNNING and seen.training is WorkerStatus.LOST:
        job = job.move(JobState.RECOVERING, now=now)
        return with_reason(job, seen.condition or _live_reason(job, seen))
    # An attempt that lost its workers before it was first observed has been running, too.
    began = seen.training is WorkerStatus.YES or (job.state is JobState.STARTING and seen.training is WorkerStatus.LOST)
    job = job.move(JobState.RUNNING, now=now) if began and job.state is not JobState.RUNNING else job
    return with_reason(job, seen.condition or _live_reason(job, seen))


def _live_reason(job: Job, seen: Observation) -> Reason | None:
    """Return the reason of a live attempt without a condition. It replaces a condition that has ended."""
    if job.state is JobState.RUNNING:
        return None
    if seen.training is WorkerStatus.LOST:
        return seen.loss_reason or Reason(
            Code.WORKERS_LOST, "workers were lost; the run resumes from its newest checkpoint"
        )
    return last_end(job)


def _end_with_outcome(job: Job, outcome: Outcome, *, committed: int | None, now: float, retry: Retry) -> Job:
    if outcome.result == "succeeded":
        return job.end_attempt("succeeded", now=now, step=committed).move(JobState.SUCCEEDED, now=now)
    if outcome.result == "moved":
        # The next attempt starts at once, and this one does not count as a failure.
        moves = f"moves to other hosts: {outcome.reason or 'hosts will be removed'}"
        return _move_on(job, moves, committed=committed, now=now)
    if outcome.result != "failed":
        unasked = Reason(Code.INTERRUPTED, f"the driver ended as {outcome.result} without a request")
        return _fail_attempt(job, unasked, committed=committed, now=now, retry=retry)
    reason = reported_failure(outcome)
    if outcome.retryable:
        return _fail_attempt(job, reason, committed=committed, now=now, retry=retry)
    return _fail(job, reason, committed=committed, now=now)


def _fail_attempt(job: Job, reason: Reason, *, committed: int | None, now: float, retry: Retry) -> Job:
    """End the newest attempt as failed. Retry it after a delay, or fail the job if no attempts are left."""
    job = job.end_attempt("failed", now=now, reason=reason, step=committed)
    if len(job.failures) >= job.spec.failure.max_attempts:
        return job.move(JobState.FAILED, now=now, reason=crash_loop(job.failures))
    if job.state is JobState.RUNNING:
        job = job.move(JobState.RECOVERING, now=now)
    return replace(with_reason(job, last_end(job)), next_attempt_at=now + retry.delay(job))


_RULES: Mapping[JobState, Callable[[Job, Observation, float, Retry], Decision]] = {
    JobState.STARTING: _active,
    JobState.RUNNING: _active,
    JobState.RECOVERING: _active,
    JobState.PAUSING: decide_stop,
    JobState.CANCELLING: decide_stop,
}
