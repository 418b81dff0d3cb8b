"""What runs write and read: run directories and what reads whole checkpoints."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import JsonValue

from service.domain.decide import Latest, Training
from service.domain.reason import Reason
from train_loop.run_dir import ExportStatus, ExportWish, Manifest, Outcome, Parent, Stop
from train_loop.spec import JobSpec, ScalingSpec

Line = Mapping[str, JsonValue]
"""One line of events.jsonl or metrics.jsonl: every writer may add fields."""


@dataclass(frozen=True)
class Sighting:
    """What an attempt left in the run directory."""

    training: Training
    outcome: Outcome | None
    stop: Stop | None
    lost: Reason | None = None
    """Why workers were lost, if the attempt reported it."""
    size: int = 0
    """Of what it has written: where it grows, somebody is alive."""
    ready: bool = False
    """Whether its workers are there, who should be heard of."""
    condition: Reason | None = None
    """Why they make no progress, by the newest event about it."""
    left: tuple[str, ...] = ()
    """Hosts of the newest workers_lost event."""
    draining: Mapping[str, float] = field(default_factory=dict)
    """Hosts that will be taken away, and when the notice came (Unix seconds)."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, by its newest metrics line."""

    step: int
    of: int | None
    loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_seconds: float | None = None
    time: float | None = None
    """When that line was written, in Unix seconds."""
    step_seconds: float | None = None
    """The median of the last 50 logged steps."""
    data_wait: float | None = None
    """Which part of the newest logged step waited for data."""


@dataclass(frozen=True)
class Loss:
    """A loss of workers: when (Unix seconds), and why."""

    time: float
    message: str


@dataclass(frozen=True)
class Story:
    """What a run directory tells about all attempts."""

    restarts: int
    lost_steps: int
    """Optimizer steps that were trained again after faults."""
    lost_seconds: float
    """From the last new step before each fault to the first one after it."""
    productive_seconds: float
    """Of steps that were new."""
    progress: Progress | None
    hosts: tuple[str, ...] = ()
    """Hosts of its newest worker group; empty once that was lost."""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    """The newest loss of workers on each host."""
    draining: Mapping[str, float] = field(default_factory=dict)
    """Hosts that will be taken away, and when the notice came (Unix seconds)."""
    checkpoint_at: float | None = None
    """When its newest checkpoint was committed, in Unix seconds; None if there is none."""


NO_STORY = Story(restarts=0, lost_steps=0, lost_seconds=0.0, productive_seconds=0.0, progress=None)
"""Of a run that has not begun."""


@dataclass(frozen=True)
class Reading:
    """A story, when it was read, and why there is no newer one."""

    story: Story
    read_at: float | None
    """Unix seconds; None if it was never read."""
    error: str | None = None
    """What is wrong with the storage; None if it answers."""
    since: float | None = None
    """Unix seconds since when its root has been unavailable, if that is known."""
    root: str | None = None
    """The storage root that does not answer."""


@dataclass(frozen=True)
class Cursor:
    """Where to go on in lines merged over attempts: after this line of this attempt."""

    attempt: int = 0
    seq: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}.{self.seq}"


@dataclass(frozen=True)
class Place:
    """Where a reader stands: at a byte of what an attempt has written."""

    attempt: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Entry:
    """A whole line, and the place behind it."""

    text: str
    after: Place


@dataclass(frozen=True)
class Written:
    """Which of an attempt's files: events, metrics, or a log, which is the driver's where no rank is named."""

    kind: Literal["events", "metrics", "log"]
    rank: int | None = None


@dataclass(frozen=True)
class Tail:
    """The next whole lines, a bounded part of them, and which attempt comes next, if one has begun."""

    entries: tuple[Entry, ...]
    more: bool
    next_attempt: int | None


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    manifest: Manifest
    pinned: bool


class RunDirs(Protocol):
    """Run directories by their URI: the only channel to the workers."""

    def prepare(self, run_dir: str, spec: JobSpec, size: ScalingSpec, *, attempt: int) -> None:
        """Write the spec and the attempt's size, and shut out older attempts. Repeatable. Raises StaleAttempt."""

    def fence_off(self, run_dir: str, *, attempt: int) -> None:
        """Shut out every attempt older than this one."""

    def ask_to_stop(self, run_dir: str, stop: Stop) -> None:
        """Write control/stop.json."""

    def observe(self, run_dir: str, attempt: int) -> Sighting:
        """What an attempt says of itself."""

    def latest(self, run_dir: str) -> Latest:
        """The newest attempt that was prepared or shut out; number 0 where there is none."""

    def story(self, run_dir: str) -> Story:
        """What all attempts say together."""

    def known_story(self, run_dir: str) -> Reading:
        """The newest story, or the last one that could be read. It does not raise while storage is unavailable."""

    def tail(self, run_dir: str, what: Written, place: Place) -> Tail:
        """The next whole lines of a file from a place on; a line that is still being written is not there yet."""

    def mark(self, run_dir: str, what: Written) -> Hashable:
        """Another value whenever there is more of a kind in any attempt; much quicker than reading it."""

    def newest_attempt(self, run_dir: str) -> int:
        """Its number; 1 where none has begun."""

    def inherit(self, run_dir: str, parent: Parent) -> bool:
        """Have a run that has not begun go on from another one's checkpoint, and keep that; whether it is there."""

    def parent(self, run_dir: str) -> Parent | None:
        """Return the checkpoint of another run that a run began from; None if it began at its first step."""

    def let_go(self, run_dir: str) -> None:
        """Leave the checkpoint that a run was begun from to retention. Repeatable."""

    def committed(self, run_dir: str) -> int | None:
        """The newest committed step."""

    def checkpoints(self, run_dir: str) -> list[Checkpoint]:
        """The committed checkpoints, oldest first."""

    def pin(self, run_dir: str, step: int) -> bool:
        """Keep a checkpoint whatever retention says; whether it was there to be kept."""

    def unpin(self, run_dir: str, step: int) -> None:
        """Leave a checkpoint to retention again."""

    def exported(self, run_dir: str, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """How far an export is; None where nobody asked for it."""

    def write_export(self, run_dir: str, status: ExportStatus) -> None:
        """Say how far an export is."""


class CheckpointTools(Protocol):
    """What reads whole checkpoints, each time in a process of its own."""

    def verify(self, run_dir: str, step: int) -> list[str] | None:
        """What is wrong with it; None where there is none of this step. Raises VerifyFailed."""

    def export(self, run_dir: str, step: int, wish: ExportWish) -> None:
        """Begin to make a Hugging Face folder of it. Raises Busy."""
