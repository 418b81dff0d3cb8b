"""Run directories, read through `train_loop.run_dir`, and the files that the service may write there."""

import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from service.adapters.storage.roots import StorageRoots, root_of
from service.adapters.storage.run_summary import RunSummaryReader
from service.domain.jobs.condition import Conditions
from service.domain.jobs.observation import LatestAttempt, WorkerStatus
from service.errors import CheckpointUnknown, StaleAttempt, UnusableRunDir
from service.ports import (
    EMPTY_SUMMARY,
    AttemptObservation,
    Checkpoint,
    LogChunk,
    LogLine,
    LogOffset,
    LogSource,
    Reading,
    RunSummary,
)
from train_loop.run_dir import (
    STARTED,
    AttemptDir,
    ExportStatus,
    ExportWish,
    Outcome,
    Parent,
    RunDir,
    Stop,
    UnknownFormatError,
    is_remote,
    read_appended,
    read_lines,
    size_appended,
    storage_failed,
    write_run_marker,
)
from train_loop.spec import AnyJobSpec, ScalingSpec

_TRAINING = {**dict.fromkeys(STARTED, WorkerStatus.YES), "workers_lost": WorkerStatus.LOST}
_READY = {**dict.fromkeys(("workers_ready", *STARTED), True), "workers_lost": False, "moving": False}
_WINDOW = 1 << 18
"""Bytes per read. A longer line of a log is returned in parts."""
_LONGEST_LINE = 1 << 24
"""Bytes of a JSON line; a longer one is read in parts, of which none is JSON, so that memory is bounded."""
_CACHED_READERS = 1024
"""Maximum number of runs whose summary is cached."""


class LocalRunDirs:
    """Run directories on storage that the service and the workers share."""

    def __init__(self, roots: StorageRoots | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._roots = roots or StorageRoots()
        self._clock = clock
        self._lock = threading.Lock()
        self._readers: dict[str, RunSummaryReader] = {}

    def check(self, root: str) -> None:
        """Raise StorageUnavailable if a storage root that was used before is missing or was replaced."""
        self._roots.check(root)

    def _open(self, run_dir: str) -> RunDir:
        """Check the storage root, and return the run directory without creating it."""
        self._roots.check(root_of(run_dir))
        return RunDir.at(run_dir)

    def _begin(self, run_dir: str) -> RunDir:
        """Return a run directory for writing; create it if needed. Only the service may create run directories.

        Raises StorageUnavailable if the storage root is missing or was replaced.
        """
        marker = self._roots.open(root_of(run_dir))
        directory = RunDir.at(run_dir)
        write_run_marker(directory.root, marker)
        return directory

    def prepare(self, run_dir: str, spec: AnyJobSpec, size: ScalingSpec, *, attempt: int) -> None:
        """Write the spec and the attempt's size, and fence off older attempts. Repeatable.

        Raises StaleAttempt if this attempt is fenced off, UnusableRunDir if the folder holds no spec of this run.
        """
        directory = self._begin(run_dir)
        try:
            directory.write_spec(spec)
        except ValueError as error:
            raise UnusableRunDir(f"{run_dir}/spec.json", str(error)) from error
        directory.attempt(attempt).write_size(size)
        directory.write_fence(attempt)
        if directory.fence().attempt > attempt:
            raise StaleAttempt(run_dir, attempt)

    def fence_off(self, run_dir: str, *, attempt: int) -> None:
        """Fence off every attempt older than this one."""
        self._begin(run_dir).write_fence(attempt)

    def request_stop(self, run_dir: str, stop: Stop) -> None:
        """Write control/stop.json."""
        self._begin(run_dir).write_stop(stop)

    def observe(self, run_dir: str, attempt: int) -> AttemptObservation:
        """Read the state of an attempt."""
        directory = self._open(run_dir)
        folder = directory.attempt(attempt)
        training, ready, conditions, finished = WorkerStatus.NOT_YET, False, Conditions(), None
        for line in read_lines(folder.events):
            event = str(line.get("event"))
            training, ready = _TRAINING.get(event, training), _READY.get(event, ready)
            conditions.read(line)
            if event == "finished":
                with suppress(ValidationError):
                    finished = Outcome.model_validate(line)
        size = size_appended(folder.metrics) + size_appended(folder.events)
        return AttemptObservation(
            training,
            folder.outcome(),
            directory.stop(),
            conditions.lost,
            size,
            ready,
            conditions.newest,
            conditions.left,
            conditions.draining,
            waits_for=conditions.waits_for,
            head=conditions.head,
            # On object storage each look is a request, and an attempt with events has a run directory.
            gone=not (size and is_remote(directory.root)) and not directory.exists(),
            finished=finished,
        )

    def latest(self, run_dir: str) -> LatestAttempt:
        """Return the newest attempt that was prepared or fenced off; number 0 if there is none."""
        directory = self._open(run_dir)
        fence = directory.fence().attempt
        prepared = max((attempt.number for attempt in directory.attempts()), default=0)
        # A fence rejects every attempt older than its number, even if that was never prepared.
        number = max(prepared, fence - 1)
        return LatestAttempt(number, directory.attempt(number).size(), fenced=fence > number)

    def summary(self, run_dir: str) -> RunSummary:
        """Return the summary of all attempts."""
        with self._lock:
            reader = self._readers.pop(run_dir, None) or RunSummaryReader(RunDir.at(run_dir))
            # The cache evicts the least recently used run.
            self._readers[run_dir] = reader
            if len(self._readers) > _CACHED_READERS:
                del self._readers[next(iter(self._readers))]
        self._roots.check(root_of(run_dir))
        return reader.update(partial(self.tail, run_dir), now=self._clock())

    def latest_summary(self, run_dir: str) -> Reading:
        """Return the current summary, or the last one read with the error that prevents a newer one."""
        try:
            return Reading(self.summary(run_dir), self._clock())
        except Exception as error:
            if not storage_failed(error):
                raise
            return replace(self.last_summary(run_dir), error=str(error))

    def last_summary(self, run_dir: str) -> Reading:
        """Return the last summary that was read, without access to the storage."""
        reader = self._readers.get(run_dir)
        return Reading(EMPTY_SUMMARY, None) if reader is None else reader.last

    def tail(self, run_dir: str, what: LogSource, place: LogOffset) -> LogChunk:
        """Return the next complete lines of a file, from `place`. Leaves out a line that is still being written."""
        directory = self._open(run_dir)
        # List the attempts before the read: if there is a later one, the read sees all lines of this one.
        later = [attempt.number for attempt in directory.attempts() if attempt.number > place.attempt]
        file = _file(directory.attempt(place.attempt), what)
        # A line of a log may never end, so it is returned in parts. A part of a JSON line is useless.
        entries, more = _next_lines(file, place, in_pieces=what.kind == "log")
        return LogChunk(entries, more, min(later, default=None))

    def mark(self, run_dir: str, what: LogSource) -> Hashable:
        """Return a value that changes whenever this file grows in any attempt. Much faster than a read."""
        attempts = self._open(run_dir).attempts()
        return tuple((attempt.number, size_appended(_file(attempt, what))) for attempt in attempts)

    def newest_attempt(self, run_dir: str) -> int:
        """Return the number of the newest attempt; 1 if none has started."""
        return max((attempt.number for attempt in self._open(run_dir).attempts()), default=1)

    def link_parent(self, run_dir: str, parent: Parent) -> bool:
        """Pin another run's checkpoint, and let a new run start from it. Return False if it does not exist."""
        heir = RunDir.at(run_dir)
        if not self._open(parent.run_dir).pin(parent.manifest.step, by=_pinned_by(heir)):
            return False
        self._begin(run_dir).write_parent(parent)
        return True

    def parent(self, run_dir: str) -> Parent | None:
        """Return the checkpoint of another run from which a run started; None if it started at its first step."""
        return RunDir.at(run_dir).parent()

    def release_parent(self, run_dir: str) -> None:
        """Remove the run's pin from the checkpoint that it started from. Repeatable."""
        heir = self._open(run_dir)
        if (parent := heir.parent()) is not None:
            self._open(parent.run_dir).unpin(parent.manifest.step, by=_pinned_by(heir))

    def trained_tokenizer(self, run_dir: str) -> str | None:
        """Return the folder of the tokenizer of a run's prepared data; None if it has none."""
        return self._open(run_dir).tokenizer()

    def committed(self, run_dir: str) -> int | None:
        """Return the newest committed step, or the number of committed shards of results; None if there is none."""
        directory = self._open(run_dir)
        try:
            return directory.committed()
        except UnknownFormatError:
            # Another version has committed it; a job that cannot read it must still come to its end.
            return max(directory.checkpoint_folders(), default=None)

    def checkpoints(self, run_dir: str) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first. Raises CheckpointUnknown."""
        directory = self._open(run_dir)
        try:
            return [Checkpoint(manifest, directory.is_pinned(step)) for step, manifest in directory.manifests().items()]
        except UnknownFormatError as error:
            raise CheckpointUnknown(str(error)) from error

    def pin(self, run_dir: str, step: int) -> bool:
        """Pin a checkpoint, so that retention keeps it. Return False if it does not exist."""
        return self._open(run_dir).pin(step)

    def unpin(self, run_dir: str, step: int) -> None:
        """Remove the pin of a checkpoint, so that retention applies to it again."""
        self._open(run_dir).unpin(step)

    def exported(self, run_dir: str, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """Return the status of an export; None if it was not requested."""
        return self._open(run_dir).exports.status(step, wish, now=now)

    def write_export(self, run_dir: str, status: ExportStatus) -> None:
        """Write the status of an export."""
        self._open(run_dir).exports.write(status)


def _pinned_by(heir: RunDir) -> str:
    return f"clone-{heir.root.name}"


def _file(attempt: AttemptDir, what: LogSource) -> Path:
    if what.kind == "log":
        return attempt.driver_log if what.rank is None else attempt.rank_log(what.rank)
    return attempt.events if what.kind == "events" else attempt.metrics


def _next_lines(path: Path, place: LogOffset, *, in_pieces: bool) -> tuple[tuple[LogLine, ...], bool]:
    """Return the next complete lines, limited to about one window, and whether there may be more."""
    after, length = place.offset, _WINDOW
    if size_appended(path) <= after:
        return (), False
    window = read_appended(path, after, length)
    while b"\n" not in window and len(window) == length:
        if in_pieces or length >= _LONGEST_LINE:
            return (LogLine(window.decode(errors="replace"), replace(place, offset=after + length)),), True
        length *= 4
        window = read_appended(path, after, length)
    entries = list[LogLine]()
    for line in window.split(b"\n")[:-1]:
        after += len(line) + 1
        entries.append(LogLine(line.decode(errors="replace").rstrip("\r"), replace(place, offset=after)))
    return tuple(entries), len(window) == length
