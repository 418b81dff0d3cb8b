"""What the reason of a simulated job must agree with: its state, its attempts, its drivers and its checkpoints."""

import re

from service.domain.jobs.job import Job, JobState
from service.domain.jobs.reason import WAITS, Code

_TROUBLE = WAITS | {Code.EFFECT_FAILED, Code.CLUSTER_UNREACHABLE}
"""Codes of outages, which any job with an attempt may have."""
_ASKED = frozenset({Code.USER, Code.PREEMPTED, Code.RESIZED, Code.SERVICE_STOPPED})
"""Codes of requests to stop."""
_NEWEST = re.compile(r"the newest checkpoint is of step (\d+)|there is no checkpoint")


def contradiction(job: Job, *, committed: int) -> str | None:
    """Return what contradicts the reason of a job whose newest committed step is known; None if it is true."""
    code = job.reason.code if job.reason is not None else None
    message = job.reason.message if job.reason is not None else ""
    allowed = _ALLOWED.get(job.state)
    if allowed is not None and code not in allowed:
        return f"a job that is {job.state} has the reason {code}: {message}"
    named = _NEWEST.search(message)
    if job.state in (JobState.PAUSED, JobState.CANCELLED) and named is not None and int(named[1] or 0) != committed:
        return f"the newest checkpoint is of step {committed}, not: {message}"
    if job.state is JobState.FAILED:
        last = job.attempts[-1]
        if last.result != "failed" or last.reason is None or last.reason.message not in message:
            return f"the last attempt ended as {last.result}, {last.reason}, not: {message}"
    return None


_ALLOWED = {
    JobState.RUNNING: frozenset({None, *_TROUBLE}),
    JobState.PAUSING: _ASKED | _TROUBLE,
    JobState.PAUSED: _ASKED,
    JobState.CANCELLING: frozenset({Code.USER, *_TROUBLE}),
    JobState.CANCELLED: frozenset({Code.USER}),
    JobState.SUCCEEDED: frozenset({None}),
}
