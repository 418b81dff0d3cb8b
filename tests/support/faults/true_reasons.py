"""Rules for the reason of a simulated job: it agrees with state, attempts, drivers and checkpoints."""

import re
from collections.abc import Mapping

from service.domain.jobs.job import Attempt, Job, JobState
from service.domain.jobs.reason import WAITS, Code, code_of
from train_loop.run_dir import Outcome

_TROUBLE = WAITS | {Code.EFFECT_FAILED, Code.CLUSTER_UNREACHABLE}
"""Codes of outages, which any job with an attempt may have."""
_ASKED = frozenset({Code.USER, Code.PREEMPTED, Code.RESIZED, Code.SERVICE_STOPPED})
"""Codes of requests to stop."""
_NEWEST = re.compile(r"the newest checkpoint is of step (\d+)|there is no checkpoint")


def contradiction(job: Job, *, committed: int, outcomes: Mapping[int, Outcome]) -> str | None:
    """Return what contradicts the reasons of a job and its attempts; None if they are true."""
    for attempt in job.attempts:
        if (false := _contradiction(attempt, outcomes.get(attempt.number))) is not None:
            return f"attempt {attempt.number} {false}"
    return _contradiction_of_state(job, committed)


def _contradiction(attempt: Attempt, outcome: Outcome | None) -> str | None:
    """Return what contradicts the result and reason of an attempt whose driver has left this outcome."""
    code = attempt.reason.code if attempt.reason is not None else None
    if attempt.result != "moved" and (code is None) == (attempt.result == "failed"):
        return f"ended as {attempt.result} for the reason {attempt.reason}"
    if code is Code.DRIVER_LOST and outcome is not None:
        # A driver that starts after its attempt has ended finds the fence.
        if outcome.code == Code.FENCED:
            return None
        return f"has the outcome {outcome} and the reason {attempt.reason}"
    # The code differs for an unreadable outcome, and after a planned end of the cluster.
    if code in (None, Code.STORAGE_UNAVAILABLE, Code.MOVING) or outcome is None or outcome.result != "failed":
        return None
    if code_of(outcome.code) is not code:
        return f"failed with {outcome}, not {attempt.reason}"
    return None


def _contradiction_of_state(job: Job, committed: int) -> str | None:
    """Return what contradicts the reason of a job in its state, with its newest committed step."""
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


_FAILURES = frozenset({Code.DRIVER_LOST, Code.WORKER_FAILURE, Code.WORKERS_LOST, Code.FENCED, Code.HUNG})
_ALLOWED = {
    JobState.STARTING: frozenset({None}) | _TROUBLE | _FAILURES,
    JobState.RECOVERING: _TROUBLE | _FAILURES,
    JobState.RUNNING: frozenset({None, *_TROUBLE}),
    JobState.PAUSING: _ASKED | _TROUBLE,
    JobState.PAUSED: _ASKED,
    JobState.CANCELLING: frozenset({Code.USER, *_TROUBLE}),
    JobState.CANCELLED: frozenset({Code.USER}),
    JobState.SUCCEEDED: frozenset({None}),
}
