"""A job, its attempts, and the table of legal state transitions."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from service.domain.jobs.reason import WAITS, Code, Reason
from train_loop.spec import MEMORY, AnyJobSpec, ScalingSpec


class JobState(StrEnum):
    """The state of a job."""

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
        """Return whether the state is final."""
        return not TRANSITIONS[self]


_S = JobState
# A live attempt can end at any time, so every state with one can end as SUCCEEDED or FAILED. After a cancel request the
# job becomes CANCELLED, however the attempt ends. A queued job can be paused too: it is held back.
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
ACTIVE = (_S.STARTING, _S.RUNNING, _S.RECOVERING, _S.PAUSING, _S.CANCELLING)
"""States of jobs that may have a live attempt. Only they are observed."""


@dataclass(frozen=True)
class Attempt:
    """One Ray submission of a job. Its id is stored before it is used."""

    number: int
    submission_id: str
    started_at: float
    submitted_at: float | None = None
    """Time at which the cluster was found to have the submission. From then on, a missing submission is lost."""
    ended_at: float | None = None
    result: str | None = None
    reason: Reason | None = None
    workers: int = 0
    """Number of workers that it was started with."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources of each worker."""
    step: int | None = None
    """Newest committed step at its end; None if there was none."""


_USER_REQUEST = Reason(Code.USER, "a user asked for it")


@dataclass(frozen=True)
class StopRequest:
    """A request that the newest attempt stops."""

    mode: Literal["cancel", "pause", "resize"]
    checkpoint: bool
    deadline: float
    """Unix seconds after which the driver is stopped by force."""
    reason: Reason = _USER_REQUEST
    """Origin and cause of the request."""
    then_resume: bool = False
    """True if the job is queued again once it has stopped, e.g. after a resume request during a pause."""


@dataclass(frozen=True)
class Lineage:
    """The checkpoint of another job from which a job starts."""

    job: str
    step: int


@dataclass(frozen=True)
class JobSize:
    """The size that a user requests for a job, and what its checks have found about it."""

    scaling: ScalingSpec
    sizes: tuple[int, ...] = ()
    """Possible numbers of workers of an elastic job, smallest first; empty if the size is fixed."""
    memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes of host memory that each worker reserves, by number of workers; empty if the cluster limits no worker."""


def reserve_memory(scaling: ScalingSpec, memory: Mapping[int, int]) -> ScalingSpec:
    """Return a size at which each worker reserves its memory."""
    each = memory.get(scaling.world)
    resources = {name: amount for name, amount in scaling.resources_per_worker.items() if name != MEMORY}
    return scaling if each is None else scaling.model_copy(update={"resources_per_worker": {**resources, MEMORY: each}})


@dataclass(frozen=True)
class Job:
    """One job of any kind. Times are Unix seconds."""

    id: str
    spec: AnyJobSpec
    run_dir: str
    created_at: float
    updated_at: float
    state: JobState = JobState.QUEUED
    reason: Reason | None = None
    times: Mapping[JobState, float] = field(default_factory=dict)
    """Time at which each state was last entered."""
    started_at: float | None = None
    finished_at: float | None = None
    attempts: tuple[Attempt, ...] = ()
    next_attempt_at: float | None = None
    stop_request: StopRequest | None = None
    scaling: ScalingSpec | None = None
    """Size from a resize; None means the size in the spec."""
    sizes: tuple[int, ...] = ()
    """Possible numbers of workers of an elastic job, smallest first; empty if the size is fixed."""
    memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes of host memory that each worker reserves, by number of workers; empty if the cluster limits no worker."""
    granted: int | None = None
    """Number of workers that an elastic job was given when it was last admitted."""
    parent: Lineage | None = None
    """Checkpoint that it was cloned from; None if it starts at its first step."""
    version: int = 1
    """Version of the stored row; a change to an older version is discarded."""

    @property
    def attempt(self) -> Attempt | None:
        """Return the newest attempt; None if there is none."""
        return self.attempts[-1] if self.attempts else None

    @property
    def failures(self) -> tuple[Attempt, ...]:
        """Return the failed attempts that count against `max_attempts`: those since the last new committed step.

        An attempt that failed because the cluster has another version of Trainshed does not count.
        """
        return tuple(one for one in self.failed if one.reason is None or one.reason.code is not Code.VERSION_SKEW)

    @property
    def failed(self) -> tuple[Attempt, ...]:
        """Return the failed attempts since the last attempt that committed a new step."""
        return tuple(one for one in self.attempts[max(self._newest_progress, 0) :] if one.result == "failed")

    @property
    def moves_in_vain(self) -> int:
        """Return how many attempts in a row, up to the newest, moved before they committed a new step."""
        later = reversed(self.attempts[self._newest_progress + 1 :])
        return sum(1 for _ in itertools.takewhile(lambda attempt: attempt.result == "moved", later))

    @property
    def _newest_progress(self) -> int:
        """Return the index of the last attempt that committed a new step; -1 if there is none."""
        found, best = -1, -1
        for index, attempt in enumerate(self.attempts):
            if attempt.step is not None and attempt.step > best:
                found, best = index, attempt.step
        return found

    @property
    def requested_scaling(self) -> ScalingSpec:
        """Return the size that users requested, which may be a range."""
        return self.scaling or self.spec.scaling

    @property
    def size(self) -> ScalingSpec:
        """Return the size of the next attempt, with the memory that its workers reserve."""
        return reserve_memory(self.chosen_size, self.memory)

    @property
    def chosen_size(self) -> ScalingSpec:
        """Return the size of the next attempt in the spec's terms, from which a user may request another one.

        An elastic job that is not admitted has its smallest size.
        """
        return self.requested_scaling.at(self.granted or self.sizes[0]) if self.sizes else self.requested_scaling

    @property
    def waits_for(self) -> Reason | None:
        """Return the reason why a live attempt makes no progress; None if it makes progress."""
        if self.reason is None or not self.holds_resources:
            return None
        return self.reason if self.state is JobState.RECOVERING or self.reason.code in WAITS else None

    @property
    def most_workers(self) -> int:
        """Return the largest number of workers that any attempt has had or may have."""
        return max(self.requested_scaling.bounds[1], *(attempt.workers for attempt in self.attempts), 0)

    @property
    def holds_resources(self) -> bool:
        """Return whether the cluster must reserve resources for the job."""
        if self.state in (JobState.PAUSING, JobState.CANCELLING):
            return self.attempt is not None and self.attempt.ended_at is None
        return self.state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)

    def move(self, state: JobState, *, now: float, reason: Reason | None = None) -> "Job":
        """Return the job in another state. Raises ValueError if the table has no such transition."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.id} cannot go from {self.state} to {state}; see service.domain.job.TRANSITIONS")
        finished = now if state.terminal else None
        times = {**self.times, state: now}
        return replace(self, state=state, reason=reason, times=times, updated_at=now, finished_at=finished)

    def begin_attempt(self, *, now: float) -> "Job":
        """Return the job with its next attempt, which is not submitted yet."""
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
        """Return the job with all attempts up to `number`, the newest in its run directory.

        The newest may be alive. The results of the attempts before it are unknown.
        """
        job = self.end_attempt("forgotten", now=now)
        if size is not None and self.sizes:
            job = replace(job, granted=size.world)
        while len(job.attempts) < number:
            job = job.end_attempt("forgotten", now=now).begin_attempt(now=now)
        return job.mark_submitted(now=now)

    def mark_submitted(self, *, now: float) -> "Job":
        """Return the job with its newest attempt marked as submitted."""
        return replace(self, attempts=(*self.attempts[:-1], replace(self.attempts[-1], submitted_at=now)))

    def end_attempt(self, result: str, *, now: float, reason: Reason | None = None, step: int | None = None) -> "Job":
        """Return the job with its newest attempt ended; the same job if no attempt is live."""
        if not self.attempts or self.attempts[-1].ended_at is not None:
            return self
        ended = replace(self.attempts[-1], ended_at=now, result=result, reason=reason, step=step)
        return replace(self, attempts=(*self.attempts[:-1], ended))
