"""What a user's word does to a job: pause, resume, cancel, at any moment, and again. Pure; each raises IllegalState."""

from dataclasses import replace

from service.domain.job import Job, JobState, Wish
from service.domain.moves import resume
from service.domain.reason import Code, Reason
from service.errors import IllegalState
from train_loop.spec import ScalingSpec

_CANCELLED = Reason(Code.USER, "cancelled by a user")
_RESIZED = Reason(Code.RESIZED, "goes on at the size that a user asked for, once there is room")
_PAUSED = Reason(Code.USER, "paused by a user", "resume it when it is to go on")


def cancelled(job: Job, *, deadline: float, checkpoint: bool, now: float) -> Job:
    """The job after a cancel; asked again, it can only have less time."""
    if job.state is JobState.CANCELLED:
        return job
    if job.state.terminal:
        raise IllegalState(f"{job.id} is {job.state} and cannot be cancelled any more; nothing needs to be done")
    if job.state is JobState.CANCELLING and job.wish is not None:
        return _sooner(job, job.wish, deadline)
    wish = Wish("cancel", checkpoint=checkpoint, deadline=deadline, reason=_CANCELLED)
    return replace(job.move(JobState.CANCELLING, now=now, reason=_CANCELLED), wish=wish)


def paused(job: Job, *, deadline: float, now: float) -> Job:
    """The job after a pause, which it keeps until a user resumes it, whoever had asked for one before."""
    if job.state.terminal or job.state is JobState.CANCELLING:
        raise IllegalState(f"{job.id} is {job.state} and cannot be paused any more; clone it to train on")
    wish = Wish("pause", checkpoint=True, deadline=deadline, reason=_PAUSED)
    if job.state is JobState.PAUSED:
        kept = job.wish if job.wish is not None and job.wish.reason.code is Code.USER else wish
        return job if kept == job.wish else replace(job, wish=kept, reason=_PAUSED, updated_at=now)
    if job.state is JobState.PAUSING and job.wish is not None:
        if job.wish.reason.code is Code.USER and not job.wish.then_resume:
            return _sooner(job, job.wish, deadline)
        return _sooner(replace(job, reason=_PAUSED), replace(wish, deadline=job.wish.deadline), deadline)
    return replace(job.move(JobState.PAUSING, now=now, reason=_PAUSED), wish=wish)


def resumed(job: Job, scaling: ScalingSpec | None, sizes: tuple[int, ...] = (), *, deadline: float, now: float) -> Job:
    """The job after a resume, at another size if one is given; `sizes` are those it may then have, if it is elastic.

    One that is on its way to a pause goes on after it; one that runs at another size saves, and waits for room.
    """
    if job.state.terminal or job.state is JobState.CANCELLING:
        raise IllegalState(f"{job.id} is {job.state} and cannot be resumed; clone it to train on from a checkpoint")
    sized = job
    if scaling is not None and scaling != job.asked:
        # What it holds now its attempt knows; `granted` is about the size before.
        sized = replace(job, scaling=scaling, sizes=sizes, granted=None)
    if job.state is JobState.PAUSED:
        return resume(sized, now=now)
    if sized is not job and job.state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING):
        wish = Wish("resize", checkpoint=True, deadline=deadline, reason=_RESIZED, then_resume=True)
        return replace(sized.move(JobState.PAUSING, now=now, reason=_RESIZED), wish=wish)
    if job.state is JobState.PAUSING and job.wish is not None and not job.wish.then_resume:
        return replace(sized, wish=replace(job.wish, then_resume=True))
    return sized


def _sooner(job: Job, wish: Wish, deadline: float) -> Job:
    wish = replace(wish, deadline=min(wish.deadline, deadline))
    return job if wish == job.wish else replace(job, wish=wish)
