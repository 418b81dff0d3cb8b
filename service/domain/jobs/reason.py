"""Reasons for the state of a job: a stable code for programs, a message for people, and a remedy."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum


class Code(StrEnum):
    """All reason codes. An attempt reports its end (`train_loop.errors`) with the same codes."""

    CLUSTER_UNREACHABLE = "cluster_unreachable"
    UNSCHEDULABLE = "unschedulable"
    QUEUE = "queue"
    QUOTA = "quota"
    CAPACITY = "capacity"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    EFFECT_FAILED = "effect_failed"
    HOST_LOST = "host_lost"
    STALLED = "stalled"
    MOVING = "moving"
    WORKERS_LOST = "workers_lost"
    DRIVER_LOST = "driver_lost"
    WORKER_FAILURE = "worker_failure"
    CHECKPOINT_FAILED = "checkpoint_failed"
    VERSION_SKEW = "version_skew"
    INTERRUPTED = "interrupted"
    FENCED = "fenced"
    HUNG = "hung"
    CRASH_LOOP = "crash_loop"
    USER_ERROR = "user_error"
    DATA_ERROR = "data_error"
    MODEL_ERROR = "model_error"
    OUT_OF_MEMORY = "out_of_memory"
    NONFINITE = "nonfinite"
    USER = "user"
    PREEMPTED = "preempted"
    RESIZED = "resized"
    SERVICE_STOPPED = "service_stopped"


WAITS = frozenset(
    {
        Code.CLUSTER_UNREACHABLE,
        Code.CAPACITY,
        Code.STORAGE_UNAVAILABLE,
        Code.HOST_LOST,
        Code.STALLED,
        Code.MOVING,
    }
)
"""Codes of a live attempt that makes no progress: it waits until their cause ends."""


@dataclass(frozen=True)
class Reason:
    """One reason; `remedy` is an action for the job's owner, if there is one."""

    code: Code
    message: str
    remedy: str | None = None


def storage_unavailable(error: str, since: float | None = None, *, root: str | None = None) -> Reason:
    """Return the reason of a job whose storage root has been unavailable since `since` (Unix seconds)."""
    storage = "storage" if root is None else f"storage {root}"
    when = "" if since is None else f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Reason(
        Code.STORAGE_UNAVAILABLE,
        f"{storage} has been unavailable{when}: {error}",
        "mount it again on every host; workers train until their next save, which waits for the storage",
    )


def code_of(word: str | None) -> Code:
    """Return the code that an attempt reported. A code that only another version knows becomes WORKER_FAILURE."""
    try:
        return Code(word or "")
    except ValueError:
        return Code.WORKER_FAILURE
