"""Metrics of a stored change of a job. Pure."""

from service.domain.jobs.job import Job, JobState


def waited(before: Job, after: Job) -> float | None:
    """Return how many seconds a job waited before it started; None if this change does not start it."""
    if before.state not in (JobState.QUEUED, JobState.PAUSED) or after.state is not JobState.STARTING:
        return None
    # A clock that was set back must not give a negative wait.
    return max(after.times[JobState.STARTING] - before.times.get(before.state, before.created_at), 0.0)


def outcomes(before: Job, after: Job) -> tuple[str, ...]:
    """Return the results of the attempts that this change ended."""
    over = sum(attempt.ended_at is not None for attempt in before.attempts)
    return tuple(attempt.result or "unknown" for attempt in after.attempts[over:] if attempt.ended_at is not None)
