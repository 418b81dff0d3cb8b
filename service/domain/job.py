"""A job, its attempts, and the one table of legal transitions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from train_loop.spec import JobSpec


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
# asked for, it is CANCELLED however the attempt ends.
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.CANCELLING}),
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
    reason: str | None = None


@dataclass(frozen=True)
class Cancel:
    """A user's wish to end the job: with a last checkpoint or not, and when patience ends (Unix seconds)."""

    deadline: float
    checkpoint: bool


@dataclass(frozen=True)
class Job:
    """One training job. Times are Unix seconds."""

    id: str
    spec: JobSpec
    run_dir: str
    created_at: float
    updated_at: float
    state: JobState = JobState.QUEUED
    reason: str | None = None
    started_at: float | None = None
    finished_at: float | None = None
    attempts: tuple[Attempt, ...] = ()
    next_attempt_at: float | None = None
    cancel: Cancel | None = None
    version: int = 1
    """Counts the changes of the stored row; a change on top of an older one is discarded."""

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def holds_resources(self) -> bool:
        """Whether the cluster has to keep room for the job."""
        return bool(self.attempts) and not self.state.terminal and self.state is not JobState.PAUSED

    def move(self, state: JobState, *, now: float, reason: str | None = None) -> "Job":
        """The job in another state. Raises ValueError where the table has no such transition."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.id} cannot go from {self.state} to {state}; see service.domain.job.TRANSITIONS")
        finished = now if state.terminal else None
        return replace(self, state=state, reason=reason, updated_at=now, finished_at=finished)

    def begin_attempt(self, *, now: float) -> "Job":
        """The job with its next attempt, which nobody has submitted yet."""
        number = len(self.attempts) + 1
        attempt = Attempt(number, f"{self.id}-{number}", started_at=now)
        return replace(
            self,
            attempts=(*self.attempts, attempt),
            started_at=self.started_at or now,
            next_attempt_at=None,
            updated_at=now,
        )

    def mark_submitted(self, *, now: float) -> "Job":
        """The job once the cluster has its newest attempt."""
        return replace(self, attempts=(*self.attempts[:-1], replace(self.attempts[-1], submitted_at=now)))

    def end_attempt(self, result: str, *, reason: str | None, now: float) -> "Job":
        """The job once its newest attempt, if it has a live one, is over."""
        if not self.attempts or self.attempts[-1].ended_at is not None:
            return self
        ended = replace(self.attempts[-1], ended_at=now, result=result, reason=reason)
        return replace(self, attempts=(*self.attempts[:-1], ended))
