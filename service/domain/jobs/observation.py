"""Observation of a job's newest attempt: its submission in the cluster, and its run directory."""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from service.domain.jobs.reason import Reason
from train_loop.run_dir import Outcome, Stop
from train_loop.spec import ScalingSpec


class SubmissionStatus(StrEnum):
    """Status of a submission id in the cluster; UNKNOWN if the cluster does not answer."""

    MISSING = "missing"
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"

    @property
    def alive(self) -> bool:
        """Return whether the driver runs or is going to."""
        return self in (SubmissionStatus.PENDING, SubmissionStatus.RUNNING)


class WorkerStatus(Enum):
    """Status of the attempt's workers, from its newest event about them."""

    NOT_YET = auto()
    YES = auto()
    LOST = auto()


@dataclass(frozen=True)
class LatestAttempt:
    """The newest attempt in a run directory, and its size if that was written."""

    attempt: int
    size: ScalingSpec | None = None
    fenced: bool = False
    """True if the attempt is fenced off: it can no longer commit."""


NO_ATTEMPT = LatestAttempt(0)


@dataclass(frozen=True)
class Observation:
    """Observation of a job's newest attempt."""

    submission: SubmissionStatus = SubmissionStatus.UNKNOWN
    training: WorkerStatus = WorkerStatus.NOT_YET
    outcome: Outcome | None = None
    stop: Stop | None = None
    committed: int | None = None
    """Newest committed step; read only if the attempt may have ended."""
    loss_reason: Reason | None = None
    """Reason for the loss of workers, if the attempt reported it."""
    driver_end: str | None = None
    """How the driver ended, as a clause; None if it is alive or if that is unknown."""
    waits_for: str | None = None
    """Cause of the wait of an attempt after a request to stop."""
    condition: Reason | None = None
    """Reason why a live attempt makes no progress; None if it does."""
    unreachable: Reason | None = None
    """Reason to show once the cluster has not answered for some time; None before that."""
    group_up: bool = True
    """True if there are workers that read a stop request."""
    idle_seconds: float = 0.0
    """Seconds for which a training attempt has written nothing."""
    has_output: bool = False
    """True if the attempt has written something or is fenced off, even if it is not recorded as submitted."""
    newer: LatestAttempt | None = None
    """A newer attempt than the job has: the stored job is older than the run, as after a restore."""
    previous: SubmissionStatus = SubmissionStatus.MISSING
    """Status of the attempt before; read only until the newest one is submitted."""
    gone: Reason | None = None
    """Reason of a submitted attempt whose run directory was deleted or moved."""
    observed: bool = False
    """True if the run directory was read."""
