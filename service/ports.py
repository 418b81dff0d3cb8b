"""What the service needs of the world, as Protocols; adapters/ has the answers."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal, Protocol

from pydantic import JsonValue

from service.domain.access import Deed, Key
from service.domain.decide import Submission, Training
from service.domain.job import Job, JobState
from service.domain.ticket import Ticket
from service.domain.usage import Usage, UsageByDay
from train_loop.plan import Capacity, ModelShape
from train_loop.run_dir import ExportStatus, ExportWish, Manifest, Outcome, Parent, Stop
from train_loop.spec import JobSpec, Problem, ScalingSpec

KEPT_SECONDS = 24 * 3600.0
"""For so long an Idempotency-Key stands for its job."""
FLIGHT_SECONDS = 600.0
"""After so long nobody is at work any more with a key that has no job: its process has died."""
Line = Mapping[str, JsonValue]
"""One line of events.jsonl or metrics.jsonl: every writer may add fields."""


@dataclass(frozen=True)
class JobQuery:
    """Which jobs to list, newest first, those after the cursor (a job id)."""

    states: tuple[JobState, ...] = ()
    projects: frozenset[str] | None = None
    """None: any."""
    name: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    after: str | None = None
    limit: int = 50


@dataclass(frozen=True)
class Once:
    """An Idempotency-Key, the SHA-256 of the body that it came with, and whose it is."""

    key: str
    body: str
    scope: str = ""

    @property
    def id(self) -> str:
        """What tells it apart from the keys of others."""
        return f"{self.scope}:{self.key}" if self.scope else self.key


@dataclass(frozen=True)
class NewJob:
    """A job that is to be stored, with its Idempotency-Key and what the audit log says of it."""

    job: Job
    once: Once | None = None
    deed: Deed | None = None


@dataclass(frozen=True)
class Lease:
    """Who reconciles a job, and until when nobody else does (Unix seconds)."""

    owner: str
    now: float
    until: float


class JobStore(Protocol):
    """Jobs, durably."""

    def begin(self, once: Once, *, now: float) -> Job | None:
        """The job that a key stands for; None: the key is the caller's, who adds a job under it or releases it.

        Raises IdempotencyMismatch, and KeyInFlight while somebody else has it.
        """

    def release(self, once: Once) -> None:
        """Give a key back under which no job was added."""

    def add(self, new: NewJob) -> None:
        """Store a job, durably, with the key that was begun for it. Raises KeyInFlight where somebody took it since."""

    def add_all(self, added: Sequence[NewJob], *, now: float) -> bool:
        """Store jobs durably with keys that nobody began; False, and nothing stored: a key stands for another."""

    def delete(self, job: Job, used: Mapping[date, Usage], deed: Deed | None = None) -> bool:
        """Forget a job of the version that was read, but for its hours of each day (UTC); False: it has changed."""

    def get(self, job_id: str) -> Job | None:
        """The job with this id."""

    def page(self, query: JobQuery) -> list[Job]:
        """The jobs that match, newest first."""

    def used_between(self, since: float, until: float, *, projects: frozenset[str] | None = None) -> list[Job]:
        """The jobs that had an attempt between two moments."""

    def used_by_deleted(self, first: date, last: date, *, projects: frozenset[str] | None = None) -> UsageByDay:
        """What deleted jobs had used from one day to another."""

    def tickets(self) -> list[Ticket]:
        """Every job that holds room in the cluster or waits for some."""

    def queue_mark(self) -> Hashable:
        """Another value whenever `tickets` may answer otherwise; much quicker than that."""

    def lead(self, lease: Lease) -> bool:
        """Whether this owner decides about the queue until the lease ends; nobody else does meanwhile."""

    def active(self) -> list[str]:
        """The jobs that somebody has to look after: not those that wait, are paused, or have ended."""

    def claim(self, job_id: str, lease: Lease) -> Job | None:
        """The job, if nobody else holds it; it is this owner's until the lease ends."""

    def save(self, job: Job, *, owner: str | None = None, leads: bool = False, deed: Deed | None = None) -> bool:
        """Store a change of the version that was read; False: discarded.

        Where an owner is named, only while it has the job's lease; where it leads, only while it has that one instead.
        """

    def ping(self) -> None:
        """Raise unless the database answers."""


class KeyStore(Protocol):
    """Keys, and the audit log: every change of a key and its deed are stored at once, durably."""

    def add(self, key: Key, deed: Deed) -> None:
        """Store a new key."""

    def get(self, key_id: str) -> Key | None:
        """The key with this id."""

    def all(self) -> list[Key]:
        """Every key there was, newest first."""

    def revoke(self, key_id: str, *, now: float, deed: Deed) -> bool:
        """Let a key open nothing from now on; False: it was revoked before, and the first time stays."""

    def record(self, deed: Deed) -> None:
        """Write down what was done to something that is not in the database."""

    def deeds(self, projects: frozenset[str] | None, *, after: int | None, limit: int) -> list[tuple[int, Deed]]:
        """What was done in these projects, newest first, before a deed of this number; None: all of it."""


@dataclass(frozen=True)
class Launch:
    """What the cluster is told of an attempt."""

    submission_id: str
    job_id: str
    name: str
    attempt: int
    run_dir: str


class Cluster(Protocol):
    """Where drivers run. Every call may raise ClusterError, except those that have a word for not knowing."""

    def submit(self, launch: Launch) -> None:
        """Start a driver; one that is there already under this id is fine if it is the same."""

    def status(self, submission_id: str) -> Submission:
        """What became of a driver; UNKNOWN when the cluster does not answer."""

    def stop(self, submission_id: str) -> None:
        """End a driver now; one that is gone is fine."""

    def capacity(self) -> Capacity | None:
        """What all nodes have, those an autoscaler may add among them; None when the cluster does not answer."""

    def dashboard(self, submission_id: str | None) -> str | None:
        """The page that shows a submission, or the cluster."""


@dataclass(frozen=True)
class Sighting:
    """What an attempt left in the run directory."""

    training: Training
    outcome: Outcome | None
    stop: Stop | None
    trouble: str | None = None
    """What was said when workers were lost."""
    size: int = 0
    """Of what it has written: where it grows, somebody is alive."""
    ready: bool = False
    """Whether its workers are there, who should be heard of."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, by its newest metrics line."""

    step: int
    of: int | None
    loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_seconds: float | None = None


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


NO_STORY = Story(restarts=0, lost_steps=0, lost_seconds=0.0, productive_seconds=0.0, progress=None)
"""Of a run that has not begun."""


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

    def story(self, run_dir: str) -> Story:
        """What all attempts say together."""

    def tail(self, run_dir: str, what: Written, place: Place) -> Tail:
        """The next whole lines of a file from a place on; a line that is still being written is not there yet."""

    def mark(self, run_dir: str, what: Written) -> Hashable:
        """Another value whenever there is more of a kind in any attempt; much quicker than reading it."""

    def newest_attempt(self, run_dir: str) -> int:
        """Its number; 1 where none has begun."""

    def inherit(self, run_dir: str, parent: Parent) -> bool:
        """Have a run that has not begun go on from another one's checkpoint, and keep that; whether it is there."""

    def let_go(self, run_dir: str) -> None:
        """Leave the checkpoint that a run was begun from to retention. Repeatable."""

    def committed(self, run_dir: str) -> int | None:
        """The newest committed step."""

    def checkpoints(self, run_dir: str) -> list["Checkpoint"]:
        """The committed checkpoints, oldest first."""

    def pin(self, run_dir: str, step: int) -> bool:
        """Keep a checkpoint whatever retention says; whether it was there to be kept."""

    def unpin(self, run_dir: str, step: int) -> None:
        """Leave a checkpoint to retention again."""

    def exported(self, run_dir: str, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """How far an export is; None where nobody asked for it."""

    def write_export(self, run_dir: str, status: ExportStatus) -> None:
        """Say how far an export is."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    manifest: Manifest
    pinned: bool


class CheckpointTools(Protocol):
    """What reads whole checkpoints, each time in a process of its own."""

    def verify(self, run_dir: str, step: int) -> list[str] | None:
        """What is wrong with it; None where there is none of this step. Raises VerifyFailed."""

    def export(self, run_dir: str, step: int, wish: ExportWish) -> None:
        """Begin to make a Hugging Face folder of it. Raises Busy."""


@dataclass(frozen=True)
class Findings:
    """What a look at data and model found: everything wrong, and the model's sizes, unless they cannot be told."""

    problems: tuple[Problem, ...]
    shape: ModelShape | None


class Preflight(Protocol):
    """What can only be found by looking at data and model, in a process of its own."""

    def check(self, spec: JobSpec, parent: Parent | None = None) -> Findings:
        """Look. Raises PreflightFailed when it cannot say."""

    def known(self, spec: JobSpec) -> Findings | None:
        """What a look found a moment ago, where all was in order; nobody looks now."""
