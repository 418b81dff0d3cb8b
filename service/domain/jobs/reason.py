"""Reasons for the state of a job: a stable code for programs, a message for people, and a remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from signal import Signals
from types import MappingProxyType


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


HANG_REMEDY = (
    "stack traces of the ranks are in stacks/ of the attempt, and trainshed logs JOB --rank N shows the log of one; "
    "raise failure.hang_timeout_seconds if a step may take longer"
)
"""Remedy of a job whose ranks made no progress for longer than its spec allows."""


def storage_remedy(error: str, *, otherwise: str | None = None) -> str | None:
    """Return what helps against an error of storage; `otherwise` if its text does not show that."""
    return next((remedy for text, remedy in _STORAGE_REMEDIES.items() if text in error), otherwise)


_STORAGE_REMEDIES = {
    "No space left": "free space there, or delete files if it has no inodes left (df -i)",
    "Disk quota": "free space there, or raise the quota",
    "Permission denied": "let the users of service and workers read and write there",
    "Read-only": "make it writable again",
    "only regular files": "put the file itself in its place",
    "matches no file": "restore it, or mount its storage on all hosts",
}
"""What helps against errors of storage, by a part of their text."""


def storage_unavailable(
    error: str, since: float | None = None, *, root: str | None = None, trains: bool = False
) -> Reason:
    """Return the reason of a job whose storage root has been unavailable since `since` (Unix seconds).

    `trains` is whether its workers are there.
    """
    storage = "storage" if root is None else f"storage {root}"
    when = "" if since is None else f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    fix = storage_remedy(error, otherwise="mount it again on every host")
    then = "workers train until their next save, which waits for the storage" if trains else "the job then continues"
    remedy = f"{fix}; {then}"
    return Reason(Code.STORAGE_UNAVAILABLE, f"{storage} has been unavailable{when}: {error}", remedy)


def run_dir_gone(run_dir: str) -> Reason:
    """Return the reason of a job whose run directory was deleted or moved, while its storage root is available."""
    message = f"the run directory {run_dir} is gone, with its checkpoints; its storage is available"
    remedy = "move it back while the workers train, or cancel the job and submit it again"
    return Reason(Code.STORAGE_UNAVAILABLE, message, remedy)


def describe_exit(code: int) -> str:
    """Return how a process ended, as a clause, from its exit code; a shell reports signal n as 128 + n."""
    number = -code if code < 0 else code - 128
    if number not in set(Signals):
        return f"it ended with exit code {code}"
    return f"it was killed by signal {number} ({Signals(number).name}), exit code {code}"


def code_of(word: str | None) -> Code:
    """Return the code that an attempt reported. A code that only another version knows becomes WORKER_FAILURE."""
    try:
        return Code(word or "")
    except ValueError:
        return Code.WORKER_FAILURE


MEANINGS: Mapping[Code, str] = MappingProxyType(
    {
        Code.CLUSTER_UNREACHABLE: "Ray's dashboard does not answer; the state of the workers is unknown",
        Code.UNSCHEDULABLE: "the job can never start: it exceeds the cluster, its limit or a quota",
        Code.QUEUE: "an earlier job in the queue waits for more capacity",
        Code.QUOTA: "the running jobs of the project use up its quota",
        Code.CAPACITY: "the cluster has too little free capacity now",
        Code.STORAGE_UNAVAILABLE: "a storage root does not answer or is not mounted",
        Code.EFFECT_FAILED: "an action of the service, such as a submission to Ray, failed and is retried",
        Code.HOST_LOST: "a host of the worker group is silent or lost",
        Code.STALLED: "no step finishes; the message names the waiting ranks if they are known",
        Code.MOVING: "ranks move away from hosts that will be taken away, or the job from a head of Ray that ends",
        Code.WORKERS_LOST: "workers were lost on a live host",
        Code.DRIVER_LOST: "the driver was lost, usually with the head node; the next attempt resumes the run",
        Code.WORKER_FAILURE: "a worker raised an error that a retry may fix",
        Code.CHECKPOINT_FAILED: "too many saves in a row failed, or the last one failed",
        Code.VERSION_SKEW: "service and cluster have different versions of Trainshed",
        Code.INTERRUPTED: "the driver was interrupted, and no user or service had requested it",
        Code.FENCED: "a newer worker group or attempt has replaced this one",
        Code.HUNG: "no progress for longer than `failure.hang_timeout_seconds`; the workers or the attempt were ended",
        Code.CRASH_LOOP: "`failure.max_attempts` attempts in a row failed without a new committed step",
        Code.USER_ERROR: "the spec, the model or the data is wrong; a retry cannot fix it",
        Code.DATA_ERROR: "data that cannot be trained on",
        Code.MODEL_ERROR: "a model that cannot be built or trained as specified",
        Code.OUT_OF_MEMORY: "a rank ran out of device or host memory",
        Code.NONFINITE: "loss or gradients were not finite, and the spec ends the run in this case",
        Code.USER: "a user paused, resumed or cancelled the job",
        Code.PREEMPTED: "the job was paused for a job of higher priority; it resumes when there is capacity",
        Code.RESIZED: "the job changes its number of workers",
        Code.SERVICE_STOPPED: "the service with embedded Ray was stopped; the job resumes with it",
    }
)
"""The meaning of each code, for the reference page of the docs."""
