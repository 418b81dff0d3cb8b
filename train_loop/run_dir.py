"""Paths and formats of a run directory: the only channel between workers and service. Torch-free.

Workers write and the service reads, except under control/, where it is the other way round. Every file has one format
here, so that neither side has to know the other.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict

from train_loop.spec import JobSpec, dump, parse_text


class Format(BaseModel):
    """A JSON file of the run directory. Unknown fields are kept out of the way, so that versions can differ."""

    model_config = ConfigDict(frozen=True, extra="ignore")


T = TypeVar("T", bound=Format)


class Stop(Format):
    """control/stop.json: what the service asks of a running attempt; answered by its outcome."""

    mode: Literal["pause", "cancel", "resize"]
    checkpoint: bool = True
    deadline: float | None = None
    """Unix seconds after which the service ends the attempt itself."""

    @property
    def result(self) -> Literal["paused", "cancelled", "resized"]:
        """How an attempt ends that obeyed."""
        results: dict[str, Literal["paused", "cancelled", "resized"]]
        results = {"pause": "paused", "cancel": "cancelled", "resize": "resized"}
        return results[self.mode]


class Fence(Format):
    """control/fence.json: the attempt that may commit; an older one that is still alive must not."""

    attempt: int


class Outcome(Format):
    """attempts/<n>/outcome.json: how the driver ended, written last: the acknowledgement."""

    result: Literal["succeeded", "paused", "cancelled", "resized", "failed"]
    reason: str | None = None
    code: str | None = None
    """For `failed`: a stable word, for example data_error or worker_failure."""
    retryable: bool = False
    step: int = 0


class CheckpointFile(Format):
    """One file of a checkpoint, as it was when its save was committed."""

    size: int
    sha256: str


class DataPosition(Format):
    """Where in the data a run stands: samples taken of an epoch."""

    epoch: int = 0
    samples: int = 0


class Manifest(Format):
    """checkpoints/step-N/manifest.json: written last, it makes the directory a checkpoint."""

    format: int = 1
    step: int
    tokens: int
    position: DataPosition
    attempt: int
    time: float
    fingerprint: str
    """SHA-256 over the spec that was trained."""
    dataset: str
    """Fingerprint of the prepared data."""
    world: int
    mesh: dict[str, int]
    versions: dict[str, str]
    files: dict[str, CheckpointFile]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True)
class AttemptDir:
    """attempts/<n>/ of a run directory."""

    root: Path
    number: int

    @property
    def events(self) -> Path:
        """What happened, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of driver.log and one log per rank."""
        return self.root / "logs"

    @property
    def ray(self) -> Path:
        """Ray Train's own bookkeeping; nothing of ours depends on it."""
        return self.root / "ray"

    def rank_log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.logs / f"rank-{rank:05d}.log"

    @property
    def driver_log(self) -> Path:
        """The log of the driver: preparing data, starting and restarting workers."""
        return self.logs / "driver.log"

    def outcome(self) -> Outcome | None:
        """How the attempt ended; None while it has not said so."""
        return _read(self.root / "outcome.json", Outcome)

    def write_outcome(self, outcome: Outcome) -> None:
        """Say how the attempt ended, durably."""
        write_durably(self.root / "outcome.json", outcome.model_dump_json(indent=2))


@dataclass(frozen=True)
class RunDir:
    """`<storage>/<project>/<job_id>/`."""

    root: Path

    @classmethod
    def at(cls, uri: str) -> "RunDir":
        """The run directory at a file:// URI or a plain path. Raises ValueError for another scheme."""
        return cls(local_path(uri))

    def attempt(self, number: int) -> AttemptDir:
        """One attempt's folder; it need not exist yet."""
        return AttemptDir(self.root / "attempts" / str(number), number)

    def attempts(self) -> list[AttemptDir]:
        """The attempts that have begun, oldest first."""
        folder = self.root / "attempts"
        numbers = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
        return [self.attempt(number) for number in sorted(numbers)]

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The folder of a committed checkpoint."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_in_progress(self, step: int, attempt: int) -> Path:
        """The folder into which an attempt writes a checkpoint before it is committed."""
        return self.checkpoints / f"step-{step:08d}.tmp-{attempt}"

    def manifests(self) -> dict[int, Manifest]:
        """Manifests of what claims to be a checkpoint, by step; whether the files still match is for a verifier."""
        found = {path: _read(path / "manifest.json", Manifest) for path in self.checkpoints.glob("step-????????")}
        return {m.step: m for path, m in sorted(found.items()) if m is not None and path == self.checkpoint(m.step)}

    @property
    def cache(self) -> Path:
        """Prepared data of all jobs on this storage: `<storage>/_cache`."""
        return self.root.parent.parent / "_cache"

    @property
    def data(self) -> Path:
        """The pointer to the prepared data, which jobs share."""
        return self.root / "data" / "dataset.json"

    def spec(self) -> JobSpec:
        """The resolved spec. Raises FileNotFoundError, SpecError."""
        return parse_text((self.root / "spec.json").read_bytes())

    def write_spec(self, spec: JobSpec) -> None:
        """Write the resolved spec, once; the same one again is no change. Raises ValueError for another one."""
        path = self.root / "spec.json"
        if not path.exists():
            write_durably(path, dump(spec))
        elif self.spec() != spec:
            raise ValueError(f"{path} holds another spec; a run directory belongs to one job, choose a new one")

    def fence(self) -> int:
        """The attempt that may commit; 0 where none was set."""
        fence = _read(self.root / "control" / "fence.json", Fence)
        return fence.attempt if fence else 0

    def write_fence(self, attempt: int) -> None:
        """Shut out every attempt older than this one."""
        write_durably(self.root / "control" / "fence.json", Fence(attempt=attempt).model_dump_json())

    def stop(self) -> Stop | None:
        """What the service asks the running attempt to do, if anything."""
        return _read(self.root / "control" / "stop.json", Stop)

    def write_stop(self, stop: Stop) -> None:
        """Ask the running attempt to stop at its next step."""
        write_durably(self.root / "control" / "stop.json", stop.model_dump_json())


def local_path(uri: str) -> Path:
    """A file:// URI or plain path as an absolute path. Raises ValueError for another scheme."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if "://" in uri:
        raise ValueError(f"{uri}: only file:// storage is supported yet; choose a file:// URI or a path")
    return Path(os.path.abspath(uri))


def write_durably(path: Path, text: str) -> None:
    """Write a file so that a crash at any instant leaves the old one or the new one: write, fsync, rename, fsync."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonLines:
    """An append-only file of JSON objects, each with seq, time and attempt; several processes may append.

    A line that a dying writer left torn is closed with a newline by the next one, and readers pass over it.
    """

    def __init__(self, path: Path, *, attempt: int) -> None:
        self.path = path
        self.attempt = attempt

    def append(self, **fields: Any) -> None:
        """Add one line. Numbers that are not finite become null, because JSON has none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            torn, seq = _tail(file.fileno())
            head = {"seq": seq + 1, "time": time.time(), "attempt": self.attempt}
            line = json.dumps(head | {name: _finite(value) for name, value in fields.items()}, allow_nan=False)
            os.write(file.fileno(), (b"\n" if torn else b"") + line.encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON lines file, in order; nothing where there is no file."""
    if path.exists():
        with path.open("rb") as file:
            yield from filter(None, map(_parse_line, file))


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tail(descriptor: int) -> tuple[bool, int]:
    """Whether the file ends inside a line, and the seq of its last whole line."""
    size = os.fstat(descriptor).st_size
    window = 4096
    while True:
        start = max(size - window, 0)
        lines = os.pread(descriptor, size - start, start).splitlines(keepends=True)
        whole = [value for value in map(_parse_line, lines[1 if start else 0 :]) if value]
        if whole or start == 0:
            return bool(lines) and not lines[-1].endswith(b"\n"), whole[-1]["seq"] if whole else 0
        window *= 4


def _read(path: Path, kind: type[T]) -> T | None:
    """A JSON file of the run directory; None where it is missing or no such thing."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
