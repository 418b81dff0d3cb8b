"""Commands of users: pause, resume, cancel, in any state and repeatedly. Pure. Each command may raise IllegalState."""

from dataclasses import replace

from service.domain.jobs.job import Job, JobSize, JobState, StopRequest
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.transitions import resume
from service.errors import IllegalState

_CANCELLED = Reason(Code.USER, "cancelled by a user")
_RESIZED = Reason(Code.RESIZED, "resumes at the size that a user requested, once there is capacity")
_PAUSED = Reason(Code.USER, "paused by a user", "resume the job to continue")


def request_cancel(job: Job, *, deadline: float, checkpoint: bool, now: float) -> Job:
    """Return the job after a cancel request. A repeated request can only shorten its deadline."""
    if job.state is JobState.CANCELLED:
        return job
    if job.state.terminal:
        raise IllegalState(f"{job.id} is already {job.state} and cannot be cancelled; nothing needs to be done")
    if job.state is JobState.CANCELLING and job.stop_request is not None:
        return _sooner(job, job.stop_request, deadline)
    stop_request = StopRequest("cancel", checkpoint=checkpoint, deadline=deadline, reason=_CANCELLED)
    return replace(job.move(JobState.CANCELLING, now=now, reason=_CANCELLED), stop_request=stop_request)


def request_pause(job: Job, *, deadline: float, now: float) -> Job:
    """Return the job after a pause request. Only a user can resume it, even if it was preempted before."""
    if job.state.terminal or job.state is JobState.CANCELLING:
        raise IllegalState(f"{job.id} is {job.state} and cannot be paused; clone it to train further")
    stop_request = StopRequest("pause", checkpoint=True, deadline=deadline, reason=_PAUSED)
    if job.state is JobState.PAUSED:
        kept = (
            job.stop_request
            if job.stop_request is not None and job.stop_request.reason.code is Code.USER
            else stop_request
        )
        return job if kept == job.stop_request else replace(job, stop_request=kept, reason=_PAUSED, updated_at=now)
    if job.state is JobState.PAUSING and job.stop_request is not None:
        if job.stop_request.reason.code is Code.USER and not job.stop_request.then_resume:
            return _sooner(job, job.stop_request, deadline)
        return _sooner(
            replace(job, reason=_PAUSED), replace(stop_request, deadline=job.stop_request.deadline), deadline
        )
    return replace(job.move(JobState.PAUSING, now=now, reason=_PAUSED), stop_request=stop_request)


def request_resume(job: Job, size: JobSize | None, *, deadline: float, now: float) -> Job:
    """Return the job after a resume request, at another size if `size` is given.

    A pausing job resumes after the pause. A running job that gets another size saves, and is queued again.
    """
    if job.state.terminal or job.state is JobState.CANCELLING:
        raise IllegalState(f"{job.id} is {job.state} and cannot be resumed; clone it to train from a checkpoint")
    sized = job
    other = size is not None and size.scaling != job.requested_scaling
    # The memory of the host may have changed since the job was checked.
    if size is not None and (other or (job.state is JobState.PAUSED and size.memory != job.memory)):
        # The attempt has the size that the job holds now. `granted` belongs to the previous size.
        sized = replace(job, scaling=size.scaling, sizes=size.sizes, memory=size.memory, granted=None)
    if job.state is JobState.PAUSED:
        return resume(sized, now=now)
    if sized is not job and job.state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING):
        stop_request = StopRequest("resize", checkpoint=True, deadline=deadline, reason=_RESIZED, then_resume=True)
        return replace(sized.move(JobState.PAUSING, now=now, reason=_RESIZED), stop_request=stop_request)
    if job.state is JobState.PAUSING and job.stop_request is not None and not job.stop_request.then_resume:
        return replace(sized, stop_request=replace(job.stop_request, then_resume=True))
    return sized


def _sooner(job: Job, stop_request: StopRequest, deadline: float) -> Job:
    stop_request = replace(stop_request, deadline=min(stop_request.deadline, deadline))
    return job if stop_request == job.stop_request else replace(job, stop_request=stop_request)
