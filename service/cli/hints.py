"""What one will want to do next: every answer ends with it."""

from service.api.schemas import JobOut
from service.domain.job import JobState

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
    """The command that helps most with a job in its state."""
    return _NEXT[job.state].format(job.id)
