"""Ports to run directories, and to tools that read whole checkpoints."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from service.domain.jobs.head_node import HeadNode
from service.domain.jobs.job import Job
from service.domain.jobs.observation import LatestAttempt, WorkerStatus
from service.domain.jobs.reason import Reason
from service.ports.cancellation import Cancellation
from train_loop.run_dir import ExportStatus, ExportWish, Manifest, Outcome, Parent, Stop
from train_loop.spec import AnyJobSpec, ScalingSpec


@dataclass(frozen=True)
class AttemptObservation:
    """An attempt, as observed in its run directory."""

    training: WorkerStatus
    outcome: Outcome | None
    stop: Stop | None
    lost: Reason | None = None
    """Reason for the loss of workers, if the attempt reported it."""
    size: int = 0
    """Bytes of its events and metrics. If the size grows, the attempt is alive."""
    ready: bool = False
    """True if its workers are up and should write."""
    condition: Reason | None = None
    """Reason why the workers make no progress, from the newest event about it."""
    left: tuple[str, ...] = ()
    """Hosts in the newest workers_lost event."""
    draining: Mapping[str, float] = field(default_factory=dict)
    """Hosts that will be removed, mapped to the time of the notice (Unix seconds)."""
    head: HeadNode | None = None
    """Kubernetes node of the driver, if it is known."""
    waits_for: str | None = None
    """Cause of the wait after a request to stop, with the start of the wait."""
    gone: bool = False
    """True if the run directory does not exist, although its storage root is available."""
    finished: Outcome | None = None
    """The outcome in the driver's last event, which it writes before it disconnects from Ray."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run, from its newest metrics line."""

    step: int
    of: int | None
    loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_seconds: float | None = None
    time: float | None = None
    """Time of that line (Unix seconds)."""
    step_seconds: float | None = None
    """Median duration of the last 50 logged steps."""
    data_wait: float | None = None
    """Fraction of the newest logged step that was spent waiting for data."""


@dataclass(frozen=True)
class Loss:
    """A loss of workers: its time (Unix seconds) and its reason."""

    time: float
    message: str


@dataclass(frozen=True)
class RunSummary:
    """The summary of all attempts in a run directory."""

    restarts: int
    """Number of starts of training after a fault."""
    lost_steps: int
    """Number of optimizer steps that were trained again after faults."""
    lost_seconds: float
    """Seconds from the last new step before each fault to the first new step after it."""
    productive_seconds: float
    """Seconds of new steps."""
    progress: Progress | None
    hosts: tuple[str, ...] = ()
    """Hosts of the newest worker group; empty once the group is lost."""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    """Newest loss of workers on each host."""
    draining: Mapping[str, float] = field(default_factory=dict)
    """Hosts that will be removed, mapped to the time of the notice (Unix seconds)."""
    checkpoint_at: float | None = None
    """Time at which the newest checkpoint was committed (Unix seconds); None if there is none."""


EMPTY_SUMMARY = RunSummary(restarts=0, lost_steps=0, lost_seconds=0.0, productive_seconds=0.0, progress=None)
"""Summary of a run that has not started."""


@dataclass(frozen=True)
class Reading:
    """A summary, the time at which it was read, and the error that prevents a newer one."""

    summary: RunSummary
    read_at: float | None
    """Time at which it was read (Unix seconds); None if it was never read."""
    error: str | None = None
    """Error of the storage; None if the storage answers."""
    since: float | None = None
    """Unix seconds since which the storage root has been unavailable, if known."""
    root: str | None = None
    """Storage root that does not answer."""


@dataclass(frozen=True)
class Cursor:
    """A position in the merged lines of all attempts: after line `seq` of an attempt."""

    attempt: int = 0
    seq: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}.{self.seq}"


@dataclass(frozen=True)
class LogOffset:
    """A reader's position: a byte offset in a file of an attempt."""

    attempt: int = 0
    offset: int = 0


@dataclass(frozen=True)
class LogLine:
    """A complete line, and the position after it."""

    text: str
    after: LogOffset


@dataclass(frozen=True)
class LogSource:
    """A file of an attempt: events, metrics, or a log. Without a rank, it is the driver's log."""

    kind: Literal["events", "metrics", "log"]
    rank: int | None = None


@dataclass(frozen=True)
class LogChunk:
    """The next complete lines, limited in size, and the number of the next attempt if one has started."""

    entries: tuple[LogLine, ...]
    more: bool
    next_attempt: int | None


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    manifest: Manifest
    pinned: bool


class RunDirs(Protocol):
    """Run directories by URI: the only channel to the workers."""

    def prepare(self, run_dir: str, spec: AnyJobSpec, size: ScalingSpec, *, attempt: int) -> None:
        """Write the spec and the attempt's size, and fence off older attempts. Repeatable.

        Raises StaleAttempt if this attempt is fenced off, UnusableRunDir if the folder holds no spec of this run.
        """

    def fence_off(self, run_dir: str, *, attempt: int) -> None:
        """Fence off every attempt older than this one."""

    def request_stop(self, run_dir: str, stop: Stop) -> None:
        """Write control/stop.json."""

    def observe(self, run_dir: str, attempt: int) -> AttemptObservation:
        """Read the state of an attempt."""

    def latest(self, run_dir: str) -> LatestAttempt:
        """Return the newest attempt that was prepared or fenced off; number 0 if there is none."""

    def summary(self, run_dir: str) -> RunSummary:
        """Return the summary of all attempts."""

    def latest_summary(self, run_dir: str) -> Reading:
        """Return the current summary, or the last one read. Does not raise while the storage is unavailable."""

    def tail(self, run_dir: str, what: LogSource, place: LogOffset) -> LogChunk:
        """Return the next complete lines of a file, from `place`. Leaves out a line that is still being written."""

    def mark(self, run_dir: str, what: LogSource) -> Hashable:
        """Return a value that changes whenever this file grows in any attempt. Much faster than a read."""

    def newest_attempt(self, run_dir: str) -> int:
        """Return the number of the newest attempt; 1 if none has started."""

    def link_parent(self, run_dir: str, parent: Parent) -> bool:
        """Pin another run's checkpoint, and let a new run start from it. Return False if it does not exist."""

    def parent(self, run_dir: str) -> Parent | None:
        """Return the checkpoint of another run from which a run started; None if it started at its first step."""

    def release_parent(self, run_dir: str) -> None:
        """Remove the run's pin from the checkpoint that it started from. Repeatable."""

    def trained_tokenizer(self, run_dir: str) -> str | None:
        """Return the folder of the tokenizer of a run's prepared data; None if it has none."""

    def committed(self, run_dir: str) -> int | None:
        """Return the newest committed step, or the number of committed shards of results; None if there is none."""

    def checkpoints(self, run_dir: str) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first."""

    def pin(self, run_dir: str, step: int) -> bool:
        """Pin a checkpoint, so that retention keeps it. Return False if it does not exist."""

    def unpin(self, run_dir: str, step: int) -> None:
        """Remove the pin of a checkpoint, so that retention applies to it again."""

    def exported(self, run_dir: str, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """Return the status of an export; None if it was not requested."""

    def write_export(self, run_dir: str, status: ExportStatus) -> None:
        """Write the status of an export."""


@dataclass(frozen=True)
class TensorDigest:
    """A tensor's dtype, shape, and SHA-256 over both and its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Digests:
    """The digests of a checkpoint, or the faults of its files."""

    faults: tuple[str, ...]
    sha256: str
    """SHA-256 over the names and digests of all tensors."""
    tensors: Mapping[str, TensorDigest]


class CheckpointTools(Protocol):
    """Tools that read whole checkpoints, each call in a separate process."""

    def verify(self, run_dir: str, step: int, cancellation: Cancellation) -> list[str] | None:
        """Return the faults of a checkpoint; None if it does not exist.

        Raises VerifyFailed if it could not be read, CallCancelled.
        """

    def digests(self, run_dir: str, step: int, cancellation: Cancellation) -> Digests | None:
        """Return the digests or faults of a checkpoint; None if it does not exist.

        Raises VerifyFailed if it could not be read, CallCancelled.
        """

    def export(self, job: Job, step: int, wish: ExportWish) -> None:
        """Start the export of a checkpoint to a Hugging Face folder.

        Raises Busy if too many exports run, of all projects or of this one.
        """


class ResultPages(Protocol):
    """Reads results of inference jobs in a separate process."""

    def results(self, run_dir: str, *, after: int | None, limit: int, cancellation: Cancellation) -> bytes:
        """Return a page of the committed rows after an id as JSON: data, has_more and next.

        Raises ResultsUnreadable, CallCancelled.
        """
