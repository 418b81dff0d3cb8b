"""decide(job, seen, now) -> Decision: every rule by which a job moves. Pure.

A decision is the job as it should be stored, after some side effects. These are repeatable, so a crash between effect
and store is repaired by deciding again. Who starts when is decided for all jobs at once, in `admission`.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from service.domain.job import Attempt, Job, JobState, Wish
from service.domain.moves import resume
from service.domain.reason import WAITS, Code, Reason, code_of
from train_loop.run_dir import Outcome, Stop
from train_loop.spec import ScalingSpec

_SLACK_SECONDS = 60.0
_FENCE_SECONDS = 600.0
"""For so long an end waits for a run directory that cannot be written to: a request to start may be on its way."""


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
    STOP_PREVIOUS = auto()
    """The driver of the attempt before the newest."""
    FENCE_OFF = auto()
    """Have no attempt train any more, should a request to start one still be on its way."""
    LET_GO = auto()
    """Leave the checkpoint that the job was cloned from to retention again."""


@dataclass(frozen=True)
class Latest:
    """The newest attempt that a run directory knows of, and the size that it was given, if that is there."""

    attempt: int
    size: ScalingSpec | None = None
    over: bool = False
    """Whether it was shut out: it may not commit any more."""


NO_ATTEMPT = Latest(0)


@dataclass(frozen=True)
class Seen:
    """What was observed of a job's newest attempt."""

    submission: Submission = Submission.UNKNOWN
    training: Training = Training.NOT_YET
    outcome: Outcome | None = None
    stop: Stop | None = None
    committed: int | None = None
    """The newest committed step; looked for only where the attempt may be over."""
    lost: Reason | None = None
    """Why workers were lost, if the attempt reported it."""
    condition: Reason | None = None
    """Why a live attempt makes no progress; None if it does."""
    unreachable: Reason | None = None
    """Set if the cluster has not answered for so long that the job should say so."""
    group_up: bool = True
    """Whether there are workers that read a request to stop."""
    quiet: float = 0.0
    """For so many seconds an attempt that trains has written nothing."""
    begun: bool = False
    """Whether an attempt that is not known to be submitted has written, or was shut out."""
    latest: Latest | None = None
    """An attempt after the newest that is known here: what is stored is older than the run, as after a restore."""
    previous: Submission = Submission.MISSING
    """The attempt before it; looked for only until it is submitted itself."""
    observed: bool = False
    """Whether the run directory could be read."""


@dataclass(frozen=True)
class Retry:
    """How long to wait before the next attempt, in seconds."""

    base: float
    cap: float

    def delay(self, job: Job) -> float:
        """The pause after its failures in a row, up to a quarter shorter, so that jobs do not come back all at once."""
        most = min(self.base * 2.0 ** min(len(job.failed) - 1, 30), self.cap)
        return most * (1.0 - 0.25 * zlib.crc32(job.attempts[-1].submission_id.encode()) / 2**32)


@dataclass(frozen=True)
class Decision:
    """The job as it should be stored, after the effects were carried out, in their order."""

    job: Job
    effects: tuple[Effect, ...] = ()
    needed: bool = True
    """Whether the job stays as it is where an effect fails."""


def decide(job: Job, seen: Seen, *, now: float, retry: Retry) -> Decision:
    """The next step of a job; the same job where there is nothing to do."""
    rule = _RULES.get(job.state)
    if rule is None:
        return Decision(job)
    if seen.latest is not None:
        # With no effect: if it is we who are late, and not what is stored, the store discards this.
        return Decision(job.catch_up(seen.latest.attempt, seen.latest.size, now=now))
    decision = rule(job, seen, now, retry)
    if decision.job.state in _RULES:
        return decision
    fence = (Effect.FENCE_OFF,) if job.attempts else ()
    let_go = (Effect.LET_GO,) if job.parent is not None and decision.job.state.terminal else ()
    # A disk that is full for ever must not keep a job alive for ever.
    given_up = job.wish is not None and now >= job.wish.deadline + _FENCE_SECONDS
    return replace(decision, effects=(*decision.effects, *fence, *let_go), needed=not given_up)


def wanted_stop(wish: Wish, attempt: Attempt) -> Stop:
    """What control/stop.json should say."""
    return Stop(mode=wish.mode, checkpoint=wish.checkpoint, deadline=wish.deadline, attempt=attempt.number)


def _active(job: Job, seen: Seen, now: float, retry: Retry) -> Decision:
    """A job that starts, runs or recovers."""
    attempt = job.attempts[-1]
    # An outcome is the attempt's own word, and needs no cluster to confirm it.
    if attempt.ended_at is None and seen.outcome is not None:
        return Decision(_ended(job, seen.outcome, seen.committed, now, retry))
    if attempt.ended_at is not None:
        return Decision(job if now < (job.next_attempt_at or 0) else job.begin_attempt(now=now))
    if seen.submission is Submission.UNKNOWN:
        return Decision(_unanswered(job, seen))
    # One that has written was submitted, whatever is stored; who may still be at it anywhere must find a newer fence.
    if seen.submission is Submission.MISSING and attempt.submitted_at is None and not seen.begun:
        return _submit(job, seen.previous, now)
    if not seen.submission.alive:
        return Decision(_failed(job, _driver_lost(seen), seen.committed, now, retry))
    if hangs(job, seen.quiet):
        told = f"nothing was written for {seen.quiet:.0f} s; where the ranks stood is in stacks/ of the attempt"
        reason = Reason(Code.HUNG, told)
        return Decision(_failed(job, reason, seen.committed, now, retry), (Effect.STOP_NOW,))
    return Decision(_follow(job if attempt.submitted_at else job.mark_submitted(now=now), seen, now))


def _submit(job: Job, previous: Submission, now: float) -> Decision:
    # Two live drivers would share one run directory; the fence would keep it whole, but one of them would work in vain.
    if previous.alive:
        return Decision(job, (Effect.STOP_PREVIOUS,))
    if previous is Submission.UNKNOWN:
        return Decision(job)
    return Decision(_because(job.mark_submitted(now=now), _last_failure(job)), (Effect.SUBMIT,))


def hangs(job: Job, quiet: float) -> bool:
    """Whether an attempt that is quiet for so long will not go on; its workers have had the time to notice first."""
    return quiet > job.spec.failure.hang_timeout_seconds * job.spec.training.logging_steps + _SLACK_SECONDS


def _follow(job: Job, seen: Seen, now: float) -> Job:
    """Where the workers of a live attempt stand."""
    if job.state is JobState.RUNNING and seen.training is Training.LOST:
        job = job.move(JobState.RECOVERING, now=now)
        return _because(job, seen.condition or _standing(job, seen))
    # An attempt that lost its workers before anybody looked has been running all the same.
    began = seen.training is Training.YES or (job.state is JobState.STARTING and seen.training is Training.LOST)
    job = job.move(JobState.RUNNING, now=now) if began and job.state is not JobState.RUNNING else job
    return _because(job, seen.condition or _standing(job, seen))


def _standing(job: Job, seen: Seen) -> Reason | None:
    """Return the reason of a live attempt that reports no condition. A condition that has ended is forgotten."""
    if job.state is JobState.RUNNING:
        return None
    if seen.training is Training.LOST:
        return seen.lost or Reason(Code.WORKERS_LOST, "workers were lost; the run goes on from its latest checkpoint")
    return _last_failure(job)


def _unanswered(job: Job, seen: Seen) -> Job:
    """Return the job while the cluster does not answer: unknown is not failed, so only its reason may change."""
    # Storage that is away too is the reason already, and stays it: the two must not alternate.
    outages = (Code.CLUSTER_UNREACHABLE, Code.STORAGE_UNAVAILABLE)
    known = job.reason is not None and job.reason.code in outages
    return job if seen.unreachable is None or known else _because(job, seen.unreachable)


def _ended(job: Job, outcome: Outcome, committed: int | None, now: float, retry: Retry) -> Job:
    if outcome.result == "succeeded":
        return job.end_attempt("succeeded", now=now, step=committed).move(JobState.SUCCEEDED, now=now)
    if outcome.result == "moved":
        # The next attempt starts at once, and this one is no failure.
        job = job.end_attempt("moved", now=now, step=committed)
        moved = Reason(Code.MOVING, f"moves to other hosts: {outcome.reason or 'hosts are taken away'}")
        job = job.move(JobState.RECOVERING, now=now) if job.state is JobState.RUNNING else job
        return replace(job, reason=moved, next_attempt_at=now)
    if outcome.result != "failed":
        unasked = Reason(Code.INTERRUPTED, f"the driver ended as {outcome.result}, which nobody had asked for")
        return _failed(job, unasked, committed, now, retry)
    reason = _failure(outcome)
    if outcome.retryable:
        return _failed(job, reason, committed, now, retry)
    job = job.end_attempt("failed", now=now, reason=reason, step=committed)
    return job.move(JobState.FAILED, now=now, reason=reason)


def _failed(job: Job, reason: Reason, committed: int | None, now: float, retry: Retry) -> Job:
    """The newest attempt is over and another one may help."""
    job = job.end_attempt("failed", now=now, reason=reason, step=committed)
    if len(job.failures) >= job.spec.failure.max_attempts:
        return job.move(JobState.FAILED, now=now, reason=_crash_loop(job.failures))
    if job.state is JobState.RUNNING:
        job = job.move(JobState.RECOVERING, now=now)
    return replace(_because(job, _last_failure(job)), next_attempt_at=now + retry.delay(job))


def _crash_loop(failures: tuple[Attempt, ...]) -> Reason:
    """Why nobody tries again, with all that was said of them."""
    told = "; ".join(f"attempt {one.number}: {one.reason.message}" for one in failures if one.reason)
    said = f"{len(failures)} of {len(failures)} attempts failed without getting further: {told}"
    return Reason(Code.CRASH_LOOP, said, "mend what the logs name and clone the job, or raise failure.max_attempts")


def _last_failure(job: Job) -> Reason | None:
    """What happened to the newest attempt that is over, if it failed, and how often it may happen."""
    over = [attempt for attempt in job.attempts if attempt.ended_at is not None]
    if not over or over[-1].result != "failed" or over[-1].reason is None:
        return None
    counts = over[-1] in job.failures
    tries = f" ({len(job.failures)} of {job.spec.failure.max_attempts})" if counts else ""
    return replace(over[-1].reason, message=f"attempt {over[-1].number} failed{tries}: {over[-1].reason.message}")


def _stopping(job: Job, seen: Seen, now: float, retry: Retry) -> Decision:
    """A job that is to pause or to be cancelled: the loop is asked first, and the driver stopped when patience ends."""
    attempt, wish = job.attempt, job.wish
    if attempt is None or attempt.ended_at is not None or wish is None:
        return Decision(_stopped(job, now))
    if seen.outcome is not None:
        return Decision(_acknowledged(job, seen.outcome, seen.committed, now))
    late = now >= wish.deadline
    # Written before anything else, so that a driver on its way up finds it too.
    # Without workers nobody reads the request, so the driver is stopped at once. A group that starts meanwhile finds
    # the stop file, and the fence once the driver is gone.
    stop_now = (Effect.STOP_NOW,) if seen.submission.alive and (late or not seen.group_up) else ()
    if seen.stop != wanted_stop(wish, attempt) and not late:
        return Decision(job, (Effect.ASK_TO_STOP, *stop_now))
    if seen.submission is Submission.UNKNOWN:
        return Decision(_unanswered(job, seen))
    if not seen.submission.alive:
        return Decision(_gone(job, seen, now))
    passing = job.reason is not None and job.reason.code in (*WAITS, Code.EFFECT_FAILED)
    reason = seen.condition or (wish.reason if passing else job.reason)
    return Decision(_because(job, reason), stop_now)


def _acknowledged(job: Job, outcome: Outcome, committed: int | None, now: float) -> Job:
    """The driver has said how it ended, and its workers are gone."""
    reason = _failure(outcome) if outcome.result == "failed" else None
    result = "service_stopped" if outcome.result == "paused" and _service_stops(job) else outcome.result
    job = job.end_attempt(result, now=now, reason=reason, step=committed)
    if job.state is JobState.PAUSING and outcome.result == "succeeded":
        return job.move(JobState.SUCCEEDED, now=now)
    if job.state is JobState.PAUSING and outcome.result == "failed" and not outcome.retryable:
        return job.move(JobState.FAILED, now=now, reason=reason)
    return _stopped(_because(job, _told(job, outcome.reason)), now)


def _gone(job: Job, seen: Seen, now: float) -> Job:
    """The driver ended without a word, or never began."""
    if job.state is JobState.CANCELLING or job.attempts[-1].submitted_at is None:
        result = "cancelled" if job.state is JobState.CANCELLING else "paused"
        return _stopped(_because(job.end_attempt(result, now=now), _told(job, None)), now)
    if seen.submission is Submission.STOPPED and job.wish is not None:
        # We stopped it, and it had no time to write that down.
        result = "service_stopped" if _service_stops(job) else wanted_stop(job.wish, job.attempts[-1]).result
        told = _told(job, "ended without a last checkpoint, because its time was up")
        return _stopped(_because(job.end_attempt(result, now=now, step=seen.committed), told), now)
    lost = _driver_lost(seen)
    since = f"step {seen.committed}" if seen.committed is not None else "its newest checkpoint, if it has one"
    told = _told(job, f"{lost.message} before it had saved; the run goes on from {since}")
    if _service_stops(job):
        # Its time was up, and Ray was ended: no failure of the job.
        return _stopped(_because(job.end_attempt("service_stopped", now=now, step=seen.committed), told), now)
    return _stopped(_because(job.end_attempt("failed", now=now, reason=lost, step=seen.committed), told), now)


def _service_stops(job: Job) -> bool:
    return job.wish is not None and job.wish.reason.code is Code.SERVICE_STOPPED


def _told(job: Job, message: str | None) -> Reason | None:
    """Why the job was to stop, with what was said of its end; what went wrong on the way is over."""
    if job.wish is None or message is None:
        return job.wish.reason if job.wish is not None else job.reason
    return replace(job.wish.reason, message=f"{job.wish.reason.message} ({message})")


def _stopped(job: Job, now: float) -> Job:
    """The job once nothing of it runs any more."""
    if job.state is JobState.CANCELLING:
        return job.move(JobState.CANCELLED, now=now, reason=job.reason)
    paused = job.move(JobState.PAUSED, now=now, reason=job.reason)
    return resume(paused, now=now) if job.wish is not None and job.wish.then_resume else paused


def _failure(outcome: Outcome) -> Reason:
    return Reason(code_of(outcome.code), outcome.reason or outcome.code or "the driver gave no reason")


def _driver_lost(seen: Seen) -> Reason:
    return Reason(Code.DRIVER_LOST, f"the driver was lost (its submission is {seen.submission})")


def _because(job: Job, reason: Reason | None) -> Job:
    return job if job.reason == reason else replace(job, reason=reason)


_RULES: Mapping[JobState, Callable[[Job, Seen, float, Retry], Decision]] = {
    JobState.STARTING: _active,
    JobState.RUNNING: _active,
    JobState.RECOVERING: _active,
    JobState.PAUSING: _stopping,
    JobState.CANCELLING: _stopping,
}
