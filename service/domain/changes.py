"""What a stored change of a job means to those who watch the service. Pure."""

from service.domain.job import Job, JobState


def waited(before: Job, after: Job) -> float | None:
    """For how many seconds a job that starts has waited for it; None where it does not start."""
    if before.state not in (JobState.QUEUED, JobState.PAUSED) or after.state is not JobState.STARTING:
        return None
    # A clock that was set back is no wait.
    return max(after.times[JobState.STARTING] - before.times.get(before.state, before.created_at), 0.0)


def outcomes(before: Job, after: Job) -> tuple[str, ...]:
    """How the attempts ended that are over since."""
    over = sum(attempt.ended_at is not None for attempt in before.attempts)
    return tuple(attempt.result or "unknown" for attempt in after.attempts[over:] if attempt.ended_at is not None)
