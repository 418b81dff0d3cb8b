"""State transitions that the queue makes: start, preempt, resize, resume. Pure."""

from dataclasses import replace

from service.domain.jobs.job import Job, JobState, StopRequest
from service.domain.jobs.reason import Code, Reason

_LOST_SECONDS = 10.0
"""Seconds that a shrinking job has to stop before its driver is stopped by force."""


def start(job: Job, *, now: float, workers: int | None = None) -> Job:
    """Return an admitted job with its next attempt. `workers` is the size of an elastic job."""
    queued = job if job.state is JobState.QUEUED else resume(job, now=now)
    return replace(queued.move(JobState.STARTING, now=now), granted=workers).begin_attempt(now=now)


def preempt(job: Job, *, whom: str, deadline: float, now: float) -> Job:
    """Return a running job that is paused for another one, and resumes automatically later.

    `whom` is the name of the other job that this job's project may see.
    """
    reason = Reason(Code.PREEMPTED, f"preempted by {whom}; resumes once there is capacity")
    stop_request = StopRequest("pause", checkpoint=True, deadline=deadline, reason=reason)
    return replace(job.move(JobState.PAUSING, now=now, reason=reason), stop_request=stop_request)


def stop_with_service(job: Job, *, deadline: float, now: float) -> Job:
    """Return a running job that saves because the service stops with its Ray, and is then queued again."""
    reason = Reason(Code.SERVICE_STOPPED, "the service was stopped; the job resumes when the service runs again")
    stop_request = StopRequest("pause", checkpoint=True, deadline=deadline, reason=reason, then_resume=True)
    return replace(job.move(JobState.PAUSING, now=now, reason=reason), stop_request=stop_request)


def resize(job: Job, *, workers: int, timeout: float, now: float) -> Job:
    """Return a running elastic job that stops and is queued again, to resume with another number of workers.

    `timeout` is the timeout of a job that grows, in seconds. A job that lost workers cannot save and gets less time.
    """
    grows, before = workers > job.size.world, job.size.world
    why = "the cluster has more capacity" if grows else _loss(job)
    reason = Reason(Code.RESIZED, f"resumes with {workers} workers instead of {before}: {why}")
    deadline = now + (timeout if grows else min(timeout, _LOST_SECONDS))
    stop_request = StopRequest("resize", checkpoint=True, deadline=deadline, reason=reason, then_resume=True)
    return replace(job.move(JobState.PAUSING, now=now, reason=reason), stop_request=stop_request)


def _loss(job: Job) -> str:
    """Return why a job shrinks: the loss that its attempt reported, or a general message."""
    reported = job.reason is not None and job.reason.code in (Code.HOST_LOST, Code.WORKERS_LOST)
    return job.reason.message if job.reason is not None and reported else "the cluster has lost capacity"


def resume(job: Job, *, now: float) -> Job:
    """Queue a paused job again."""
    return replace(job.move(JobState.QUEUED, now=now), stop_request=None, granted=None)
