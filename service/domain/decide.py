"""decide(job, seen, now) -> Decision: every rule by which a job moves. Pure.

A decision is at most one side effect and the job as it should be stored after it. Effects are repeatable, so a crash
between effect and store is repaired by deciding again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from service.domain.admission import Queue, why_wait
from service.domain.job import Job, JobState
from train_loop.run_dir import Outcome, Stop


class Submission(StrEnum):
    """What the cluster says about a submission id; UNKNOWN is when it says nothing."""

    MISSING = "missing"
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"

    @property
    def alive(self) -> bool:
        """Whether the driver is there or will be."""
        return self in (Submission.PENDING, Submission.RUNNING)


class Training(Enum):
    """What the attempt's events say about its workers, by the newest that says anything."""

    NOT_YET = auto()
    YES = auto()
    LOST = auto()


class Effect(Enum):
    """A side effect, repeatable; what it needs to know is in the job."""

    SUBMIT = auto()
    ASK_TO_STOP = auto()
    STOP_NOW = auto()


@dataclass(frozen=True)
class Seen:
    """What was observed of a job's newest attempt and, while it is queued, of the queue."""

    submission: Submission = Submission.UNKNOWN
    training: Training = Training.NOT_YET
    outcome: Outcome | None = None
    stop: Stop | None = None
    queue: Queue = field(default_factory=Queue)


@dataclass(frozen=True)
class Retry:
    """How long to wait before the next attempt, in seconds."""

    base: float
    cap: float

    def delay(self, failed: int) -> float:
        """The pause after the n-th failed attempt."""
        return min(self.base * 2.0 ** min(failed - 1, 30), self.cap)


@dataclass(frozen=True)
class Decision:
    """The job as it should be stored, after the effect was carried out."""

    job: Job
    effect: Effect | None = None


def decide(job: Job, seen: Seen, *, now: float, retry: Retry) -> Decision:
    """The next step of a job; the same job where there is nothing to do."""
    rule = _RULES.get(job.state)
    return rule(job, seen, now, retry) if rule else Decision(job)


def wanted_stop(job: Job) -> Stop | None:
    """What control/stop.json should say."""
    if job.cancel is None:
        return None
    return Stop(mode="cancel", checkpoint=job.cancel.checkpoint, deadline=job.cancel.deadline)


def _queued(job: Job, seen: Seen, now: float, retry: Retry) -> Decision:
    reason = why_wait(job.spec.scaling, seen.queue)
    if reason is not None:
        return Decision(_because(job, reason))
    return Decision(job.move(JobState.STARTING, now=now).begin_attempt(now=now))


def _active(job: Job, seen: Seen, now: float, retry: Retry) -> Decision:
    attempt = job.attempts[-1]
    # An outcome is the attempt's own word, and needs no cluster to confirm it.
    if attempt.ended_at is None and seen.outcome is not None:
        return Decision(_ended(job, seen.outcome, now, retry))
    if seen.submission is Submission.UNKNOWN:
        return Decision(job)
    if attempt.ended_at is not None:
        return _between_attempts(job, seen, now)
    if seen.submission is Submission.MISSING and attempt.submitted_at is None:
        return Decision(_because(job.mark_submitted(now=now), _last_failure(job)), Effect.SUBMIT)
    if not seen.submission.alive:
        return Decision(_failed(job, f"the driver was lost (its submission is {seen.submission})", now, retry))
    return Decision(_follow(job if attempt.submitted_at else job.mark_submitted(now=now), seen.training, now))


def _between_attempts(job: Job, seen: Seen, now: float) -> Decision:
    if now < (job.next_attempt_at or 0):
        return Decision(job)
    # Two live drivers would share one run directory; the fence would keep it whole, but one of them would work in vain.
    return Decision(job, Effect.STOP_NOW) if seen.submission.alive else Decision(job.begin_attempt(now=now))


def _follow(job: Job, training: Training, now: float) -> Job:
    """Where the workers of a live attempt stand."""
    if job.state is JobState.RUNNING and training is Training.LOST:
        reason = "workers were lost; the run goes on from its latest checkpoint"
        return job.move(JobState.RECOVERING, now=now, reason=reason)
    # An attempt that lost its workers before anybody looked has been running all the same.
    began = training is Training.YES or (job.state is JobState.STARTING and training is Training.LOST)
    return job.move(JobState.RUNNING, now=now) if began and job.state is not JobState.RUNNING else job


def _ended(job: Job, outcome: Outcome, now: float, retry: Retry) -> Job:
    if outcome.result == "succeeded":
        return job.end_attempt("succeeded", reason=None, now=now).move(JobState.SUCCEEDED, now=now)
    if outcome.result != "failed":
        return _failed(job, f"the driver ended as {outcome.result}, which nobody had asked for", now, retry)
    reason = outcome.reason or outcome.code or "the driver gave no reason"
    if outcome.retryable:
        return _failed(job, reason, now, retry)
    return job.end_attempt("failed", reason=reason, now=now).move(JobState.FAILED, now=now, reason=reason)


def _failed(job: Job, reason: str, now: float, retry: Retry) -> Job:
    """The newest attempt is over and another one may help."""
    number, most = job.attempts[-1].number, job.spec.failure.max_attempts
    job = job.end_attempt("failed", reason=reason, now=now)
    if number >= most:
        return job.move(JobState.FAILED, now=now, reason=_last_failure(job))
    if job.state is JobState.RUNNING:
        job = job.move(JobState.RECOVERING, now=now)
    return replace(_because(job, _last_failure(job)), next_attempt_at=now + retry.delay(number))


def _last_failure(job: Job) -> str | None:
    """The sentence about the newest attempt that is over."""
    over = [attempt for attempt in job.attempts if attempt.ended_at is not None]
    most = job.spec.failure.max_attempts
    return f"attempt {over[-1].number} of {most} failed: {over[-1].reason}" if over else None


def _cancelling(job: Job, seen: Seen, now: float, retry: Retry) -> Decision:
    attempt, stop = job.attempt, wanted_stop(job)
    if attempt is None or attempt.ended_at is not None:
        return Decision(job.move(JobState.CANCELLED, now=now))
    if seen.outcome is not None:
        return Decision(_cancelled(job, seen.outcome, now))
    late = stop is not None and stop.deadline is not None and now >= stop.deadline
    # Written before anything else, so that a driver on its way up finds it too; but a disk that is full for ever must
    # not keep a job alive for ever.
    if seen.stop != stop and not late:
        return Decision(job, Effect.ASK_TO_STOP)
    if seen.submission is Submission.UNKNOWN:
        return Decision(job)
    if not seen.submission.alive:
        return Decision(_cancelled(job, None, now))
    return Decision(job, Effect.STOP_NOW if late else None)


def _cancelled(job: Job, outcome: Outcome | None, now: float) -> Job:
    result = outcome.result if outcome else "cancelled"
    return job.end_attempt(result, reason=outcome.reason if outcome else None, now=now).move(
        JobState.CANCELLED, now=now
    )


def _because(job: Job, reason: str | None) -> Job:
    return job if job.reason == reason else replace(job, reason=reason)


_RULES: Mapping[JobState, Callable[[Job, Seen, float, Retry], Decision]] = {
    JobState.QUEUED: _queued,
    JobState.STARTING: _active,
    JobState.RUNNING: _active,
    JobState.RECOVERING: _active,
    JobState.CANCELLING: _cancelling,
}
