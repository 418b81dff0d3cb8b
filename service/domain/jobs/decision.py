"""Decisions about jobs: the job to store, and the effects to run first."""

import zlib
from dataclasses import dataclass, replace
from enum import Enum, auto

from service.domain.jobs.job import Job
from service.domain.jobs.observation import Observation, SubmissionStatus
from service.domain.jobs.reason import Code, Reason

NO_FAILURE = (SubmissionStatus.STOPPED, SubmissionStatus.SUCCEEDED)
"""Ends of a driver that was stopped, or whose outcome is not a failure although it cannot be read."""


class Effect(Enum):
    """A repeatable side effect; its arguments come from the job."""

    SUBMIT = auto()
    ASK_TO_STOP = auto()
    STOP_NOW = auto()
    STOP_PREVIOUS = auto()
    """Stop the driver of the attempt before the newest."""
    FENCE_OFF = auto()
    """Fence off all attempts, in case a request to start one is still in flight."""
    RELEASE_PARENT = auto()
    """Remove the job's pin from the checkpoint that it was cloned from."""


@dataclass(frozen=True)
class Retry:
    """Exponential backoff between attempts: first and longest delay, in seconds."""

    base: float
    cap: float

    def delay(self, job: Job) -> float:
        """Return the delay after the current failures in a row, up to 25% shorter: jobs must not all retry at once."""
        most = min(self.base * 2.0 ** min(len(job.failed) - 1, 30), self.cap)
        return most * (1.0 - 0.25 * zlib.crc32(job.attempts[-1].submission_id.encode()) / 2**32)


@dataclass(frozen=True)
class Decision:
    """The job to store, and the effects to run first, one after another."""

    job: Job
    effects: tuple[Effect, ...] = ()
    needed: bool = True
    """True if a failed effect prevents the job from being stored."""


def with_reason(job: Job, reason: Reason | None) -> Job:
    """Return the job with this reason; the same job if it has the reason already."""
    return job if job.reason == reason else replace(job, reason=reason)


def with_outage(job: Job, seen: Observation) -> Job:
    """Return the job while the cluster does not answer. Unknown is not failed, so only its reason may change."""
    new, old = seen.unreachable, job.reason
    # If storage is unavailable too, that is the reason already. Keep it: the two must not alternate.
    if new is None or (old is not None and old.code is Code.STORAGE_UNAVAILABLE):
        return job
    # A restarted service knows a later start of the outage. Only a new remedy counts.
    known = old is not None and (old.code, old.remedy) == (new.code, new.remedy)
    return job if known else with_reason(job, new)
