"""Suggested next commands, printed at the end of every output."""

from service.api.schemas import JobOut
from service.domain.jobs.job import JobState

_NEXT = {
    JobState.QUEUED: "watch {}",
    JobState.STARTING: "watch {}",
    JobState.RUNNING: "watch {}",
    JobState.RECOVERING: "watch {}",
    JobState.PAUSING: "watch {} --until PAUSED",
    JobState.PAUSED: "resume {}",
    JobState.CANCELLING: "watch {} --until CANCELLED",
    JobState.CANCELLED: "clone {}",
    JobState.SUCCEEDED: "checkpoints {}",
    JobState.FAILED: "logs {}",
}


def next_of(job: JobOut) -> str:
    """Return the suggested next command for a job in its state."""
    return _NEXT[job.state].format(job.id)
