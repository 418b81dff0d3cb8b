"""The reasons of decisions about a job: why it waits, why an attempt ended, and what it has saved. Pure."""

from dataclasses import replace

from service.domain.jobs.condition import RESUMES, clock_time
from service.domain.jobs.job import Attempt, Job, StopRequest
from service.domain.jobs.observation import Observation, SubmissionStatus, WorkerStatus
from service.domain.jobs.reason import HANG_REMEDY, Code, Reason, code_of, storage_remedy
from train_loop.run_dir import Outcome

UNREAD = Reason(Code.STORAGE_UNAVAILABLE, "its storage cannot be read, so its last outcome is not known")
"""Reason of an attempt that ended after the deadline of its stop request, while nothing could be read of it."""


def planned_end_notice(seen: Observation, attempt: Attempt) -> str | None:
    """Return why the head or the host of an attempt ends as planned; None if it has not said so."""
    return seen.stop.reason if seen.stop is not None and seen.stop.attempt == attempt.number else None


def crash_loop(failures: tuple[Attempt, ...]) -> Reason:
    """Return why the job is not retried, with the message of each failure."""
    each = "; ".join(f"attempt {one.number}: {one.reason.message}" for one in failures if one.reason)
    message = f"{len(failures)} of {len(failures)} attempts failed without progress: {each}"
    newest = failures[-1].reason
    remedy = "fix the cause" if newest is None or newest.remedy is None else newest.remedy
    return Reason(Code.CRASH_LOOP, message, f"{remedy}, and clone the job, or raise failure.max_attempts")


def last_end(job: Job) -> Reason | None:
    """Return why the newest ended attempt failed, with the count and limit of failures, or why it moved; else None."""
    over = [attempt for attempt in job.attempts if attempt.ended_at is not None]
    if not over or over[-1].result not in ("failed", "moved") or over[-1].reason is None:
        return None
    if over[-1].result == "moved":
        return over[-1].reason
    counts = over[-1] in job.failures
    tries = f" ({len(job.failures)} of {job.spec.failure.max_attempts})" if counts else ""
    return replace(over[-1].reason, message=f"attempt {over[-1].number} failed{tries}: {over[-1].reason.message}")


def wait_of_stop(stop_request: StopRequest, seen: Observation) -> Reason:
    """Return the reason of a job whose attempt has not ended yet: the request, or what delays it, and its deadline."""
    # A driver that waits for capacity reads the request meanwhile.
    delay = None if seen.condition is not None and seen.condition.code is Code.CAPACITY else seen.condition
    latest = f"until {clock_time(stop_request.deadline)} at the latest"
    if delay is not None and delay.code is Code.STALLED:
        command = "cancel" if stop_request.mode == "cancel" else "pause"
        remedy = f"to stop without a new checkpoint: trainshed {command} JOB --grace 0"
        return replace(delay, message=f"{delay.message}; the {stop_request.mode} waits {latest}", remedy=remedy)
    waits = f"; waits for {seen.waits_for}, {latest}" if seen.waits_for else ""
    return delay or replace(stop_request.reason, message=f"{stop_request.reason.message}{waits}")


def began(attempt: Attempt, seen: Observation) -> bool:
    """Return whether an attempt was submitted, as far as that is known."""
    return attempt.submitted_at is not None or seen.has_output


def why_unsaved(seen: Observation, attempt: Attempt, *, late: bool) -> str:
    """Return why an attempt ended before it saved, and the newest checkpoint."""
    if not seen.observed:
        return f"{UNREAD.message}, nor is its newest checkpoint"
    # STOPPED: the service itself has stopped the driver, which takes the signal for a notice of its host.
    notice = None if seen.submission is SubmissionStatus.STOPPED else planned_end_notice(seen, attempt)
    if notice is not None:
        cause = f"{notice}; the driver was ended before it had saved"
    elif seen.loss_reason is not None and seen.training is WorkerStatus.LOST:
        cause = f"{seen.loss_reason.message.removesuffix(RESUMES)} before it saved"
    elif seen.submission is not SubmissionStatus.STOPPED:
        cause = f"{driver_loss(seen).message} before it saved"
    elif not seen.has_output:
        cause = "stopped before its driver had started"
    else:
        cause = f"stopped {'at the deadline ' if late else ''}before it saved"
    return f"{cause}; {newest_checkpoint(seen.committed)}"


def newest_checkpoint(step: int | None) -> str:
    """Return the newest checkpoint as a clause."""
    return "there is no checkpoint" if step is None else f"the newest checkpoint is of step {step}"


def stop_reason(job: Job, message: str | None) -> Reason | None:
    """Return the reason of the stop request, with a message appended. It replaces errors from before the end."""
    if job.stop_request is None or message is None:
        return job.stop_request.reason if job.stop_request is not None else job.reason
    return replace(job.stop_request.reason, message=f"{job.stop_request.reason.message} ({message})")


def reported_failure(outcome: Outcome) -> Reason:
    """Return the reason of an attempt whose driver reported a failure."""
    code, message = code_of(outcome.code), outcome.reason or outcome.code or "the driver gave no reason"
    if code is Code.HUNG:
        return Reason(code, message, HANG_REMEDY)
    # The message of a fault that the user must fix has its remedy.
    return Reason(code, message, storage_remedy(message) if outcome.retryable else None)


def hang(seen: Observation) -> Reason:
    """Return the reason of an attempt that the service ends because it hangs."""
    stall = seen.condition
    where = f"; {stall.message}" if stall is not None and stall.code is Code.STALLED else ""
    return Reason(Code.HUNG, f"the attempt hung: nothing was written for {seen.idle_seconds:.0f} s{where}", HANG_REMEDY)


def driver_loss(seen: Observation) -> Reason:
    """Return the reason of an attempt whose driver ended without an outcome."""
    how = seen.driver_end or f"the status of its submission is {seen.submission}"
    if seen.submission is SubmissionStatus.STOPPED:
        how = f"it was stopped in Ray, not by the service ({how})" if seen.driver_end else "it was stopped in Ray"
    return Reason(Code.DRIVER_LOST, f"the driver was lost: {how}", storage_remedy(how))
