"""What the queue does to a job: start it, have it make room, resize it, take it back. Pure."""

from dataclasses import replace

from service.domain.job import Job, JobState, Wish
from service.domain.reason import Code, Reason

_LOST_SECONDS = 10.0
"""For whom a place has gone to be told so, before its driver is stopped."""


def start(job: Job, *, now: float, workers: int | None = None) -> Job:
    """A waiting job with its next attempt, once it was admitted, with so many workers where it is elastic."""
    queued = job if job.state is JobState.QUEUED else resume(job, now=now)
    return replace(queued.move(JobState.STARTING, now=now), granted=workers).begin_attempt(now=now)


def make_room(job: Job, *, whom: str, deadline: float, now: float) -> Job:
    """A running job that is paused for another one, and goes on by itself later."""
    reason = Reason(Code.PREEMPTED, f"makes room for {whom}, and goes on when there is room again")
    wish = Wish("pause", checkpoint=True, deadline=deadline, reason=reason)
    return replace(job.move(JobState.PAUSING, now=now, reason=reason), wish=wish)


def stop_with_service(job: Job, *, deadline: float, now: float) -> Job:
    """Return a running job that saves because the service stops with its Ray, and is queued again after that."""
    reason = Reason(Code.SERVICE_STOPPED, "the service was stopped; the job continues when it runs again")
    wish = Wish("pause", checkpoint=True, deadline=deadline, reason=reason, then_resume=True)
    return replace(job.move(JobState.PAUSING, now=now, reason=reason), wish=wish)


def resize(job: Job, *, workers: int, patience: float, now: float) -> Job:
    """A running elastic job that is to go on with another number of workers, by way of the queue.

    One that has lost workers cannot save any more: `patience` is for those that grow, in seconds.
    """
    grows, before = workers > job.size.world, job.size.world
    why = "there is room for more" if grows else _loss(job)
    reason = Reason(Code.RESIZED, f"goes on with {workers} workers instead of {before}: {why}")
    deadline = now + (patience if grows else min(patience, _LOST_SECONDS))
    wish = Wish("resize", checkpoint=True, deadline=deadline, reason=reason, then_resume=True)
    return replace(job.move(JobState.PAUSING, now=now, reason=reason), wish=wish)


def _loss(job: Job) -> str:
    """Return why a job shrinks: the loss that its attempt has reported, if it has."""
    reported = job.reason is not None and job.reason.code in (Code.HOST_LOST, Code.WORKERS_LOST)
    return job.reason.message if job.reason is not None and reported else "the cluster has lost the room for them"


def resume(job: Job, *, now: float) -> Job:
    """A paused job back in the queue."""
    return replace(job.move(JobState.QUEUED, now=now), wish=None, granted=None)
