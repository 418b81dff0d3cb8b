"""A job, its attempts, and the one table of legal transitions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from service.domain.reason import WAITS, Code, Reason
from train_loop.spec import JobSpec, ScalingSpec


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def terminal(self) -> bool:
        """Whether nothing can happen to the job any more."""
        return not TRANSITIONS[self]


_S = JobState
# An attempt that lives can end by itself, so every state that has one can end as SUCCEEDED or FAILED; once a cancel is
# asked for, it is CANCELLED however the attempt ends. A queued job can be paused too: it is held back.
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.PAUSING, _S.CANCELLING}),
    _S.STARTING: frozenset({_S.RUNNING, _S.PAUSING, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.PAUSING, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.PAUSING, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.PAUSING: frozenset({_S.PAUSED, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.CANCELLING}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.CANCELLED: frozenset(),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
}
LIVE = tuple(state for state in JobState if not state.terminal)


@dataclass(frozen=True)
class Attempt:
    """One Ray submission of a job; its id is fixed, and stored, before it is used."""

    number: int
    submission_id: str
    started_at: float
    submitted_at: float | None = None
    """When the cluster was seen to have it: from then on, missing means gone."""
    ended_at: float | None = None
    result: str | None = None
    reason: Reason | None = None
    workers: int = 0
    """How many workers it was started with."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each of them had."""
    step: int | None = None
    """The newest committed step when it was over; None where there was none."""


_ASKED = Reason(Code.USER, "a user asked for it")


@dataclass(frozen=True)
class Wish:
    """What the newest attempt is asked to do instead of going on."""

    mode: Literal["cancel", "pause", "resize"]
    checkpoint: bool
    deadline: float
    """When patience ends, in Unix seconds: then the driver is stopped by force."""
    reason: Reason = _ASKED
    """Who asked, and why."""
    then_resume: bool = False
    """Of a pause: the job was asked to go on before it had stopped."""


@dataclass(frozen=True)
class Lineage:
    """The checkpoint of another job that a job goes on from."""

    job: str
    step: int


@dataclass(frozen=True)
class Job:
    """One training job. Times are Unix seconds."""

    id: str
    spec: JobSpec
    run_dir: str
    created_at: float
    updated_at: float
    state: JobState = JobState.QUEUED
    reason: Reason | None = None
    times: Mapping[JobState, float] = field(default_factory=dict)
    """When each state was last entered."""
    started_at: float | None = None
    finished_at: float | None = None
    attempts: tuple[Attempt, ...] = ()
    next_attempt_at: float | None = None
    wish: Wish | None = None
    scaling: ScalingSpec | None = None
    """The size it was given since; None: the one in its spec."""
    sizes: tuple[int, ...] = ()
    """Of an elastic job: the numbers of workers that it can run with, fewest first."""
    granted: int | None = None
    """Of an elastic job: how many workers it was given when it was last admitted."""
    parent: Lineage | None = None
    """What it was cloned from; None: it begins at its first step."""
    version: int = 1
    """Counts the changes of the stored row; a change on top of an older one is discarded."""

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def failures(self) -> tuple[Attempt, ...]:
        """The failed attempts that count against `max_attempts`: those since the last one that committed a new step.

        An attempt that only found another version of Trainshed on the cluster does not count.
        """
        return tuple(one for one in self.failed if one.reason is None or one.reason.code is not Code.VERSION_SKEW)

    @property
    def failed(self) -> tuple[Attempt, ...]:
        """The attempts that failed one after another since the last one that committed a new step."""
        found, best = list[Attempt](), -1
        for attempt in self.attempts:
            if attempt.step is not None and attempt.step > best:
                found, best = [], attempt.step
            if attempt.result == "failed":
                found.append(attempt)
        return tuple(found)

    @property
    def asked(self) -> ScalingSpec:
        """The size that users want, which may be a range."""
        return self.scaling or self.spec.scaling

    @property
    def size(self) -> ScalingSpec:
        """How many workers its next attempt gets, the fewest where that is open, and what each of them needs."""
        return self.asked.at(self.granted or self.sizes[0]) if self.sizes else self.asked

    @property
    def waits_for(self) -> Reason | None:
        """What a live attempt that makes no progress waits for; None if it makes progress."""
        if self.reason is None or not self.holds_resources:
            return None
        return self.reason if self.state is JobState.RECOVERING or self.reason.code in WAITS else None

    @property
    def most_workers(self) -> int:
        """How many workers any of its attempts has had, or may have."""
        return max(self.asked.bounds[1], *(attempt.workers for attempt in self.attempts), 0)

    @property
    def holds_resources(self) -> bool:
        """Whether the cluster has to keep room for the job."""
        if self.state in (JobState.PAUSING, JobState.CANCELLING):
            return self.attempt is not None and self.attempt.ended_at is None
        return self.state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)

    def move(self, state: JobState, *, now: float, reason: Reason | None = None) -> "Job":
        """The job in another state. Raises ValueError where the table has no such transition."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.id} cannot go from {self.state} to {state}; see service.domain.job.TRANSITIONS")
        finished = now if state.terminal else None
        times = {**self.times, state: now}
        return replace(self, state=state, reason=reason, times=times, updated_at=now, finished_at=finished)

    def begin_attempt(self, *, now: float) -> "Job":
        """The job with its next attempt, which nobody has submitted yet."""
        number = len(self.attempts) + 1
        size = self.size
        attempt = Attempt(
            number,
            f"{self.id}-{number}",
            started_at=now,
            workers=size.world,
            resources=size.resources_per_worker,
        )
        return replace(
            self,
            attempts=(*self.attempts, attempt),
            started_at=self.started_at or now,
            next_attempt_at=None,
            updated_at=now,
        )

    def catch_up(self, number: int, size: ScalingSpec | None, *, now: float) -> "Job":
        """The job with the attempts up to this one, of which its run directory knows and it did not.

        The newest may live; nobody knows what became of those before it.
        """
        job = self.end_attempt("forgotten", now=now)
        if size is not None and self.sizes:
            job = replace(job, granted=size.world)
        while len(job.attempts) < number:
            job = job.end_attempt("forgotten", now=now).begin_attempt(now=now)
        return job.mark_submitted(now=now)

    def mark_submitted(self, *, now: float) -> "Job":
        """The job once the cluster has its newest attempt."""
        return replace(self, attempts=(*self.attempts[:-1], replace(self.attempts[-1], submitted_at=now)))

    def end_attempt(self, result: str, *, now: float, reason: Reason | None = None, step: int | None = None) -> "Job":
        """The job once its newest attempt, if it has a live one, is over."""
        if not self.attempts or self.attempts[-1].ended_at is not None:
            return self
        ended = replace(self.attempts[-1], ended_at=now, result=result, reason=reason, step=step)
        return replace(self, attempts=(*self.attempts[:-1], ended))
