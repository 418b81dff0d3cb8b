"""Reads run directories through `train_loop.run_dir`, and writes what the service may write there."""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path

from service.adapters.chronicle import Chronicle
from service.adapters.roots import StorageRoots, root_of
from service.domain.condition import Conditions
from service.domain.decide import Latest, Training
from service.errors import StaleAttempt
from service.ports import NO_STORY, Checkpoint, Entry, Place, Reading, Sighting, Story, Tail, Written
from train_loop.run_dir import (
    AttemptDir,
    ExportStatus,
    ExportWish,
    Parent,
    RunDir,
    Stop,
    read_appended,
    read_lines,
    size_appended,
    storage_failed,
    write_run_marker,
)
from train_loop.spec import JobSpec, ScalingSpec

_TRAINING = {"training_started": Training.YES, "workers_lost": Training.LOST}
_READY = {"workers_ready": True, "training_started": True, "workers_lost": False, "moving": False}
_WINDOW = 1 << 18
"""Bytes read at once; a longer line of a log comes in pieces."""
_CHRONICLES = 1024
"""Runs whose story is remembered."""


class LocalRunDirs:
    """Run directories on storage that service and workers share."""

    def __init__(self, roots: StorageRoots | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._roots = roots or StorageRoots()
        self._clock = clock
        self._lock = threading.Lock()
        self._chronicles: dict[str, Chronicle] = {}

    def check(self, root: str) -> None:
        """Raise StorageUnavailable if a storage root that was used before is missing or is another one."""
        self._roots.check(root)

    def _open(self, run_dir: str) -> RunDir:
        """Return a run directory whose root is there, to read."""
        self._roots.check(root_of(run_dir))
        return RunDir.at(run_dir)

    def _begin(self, run_dir: str) -> RunDir:
        """Return a run directory to write to, which is created if the root is there. Only the service may do that."""
        marker = self._roots.open(root_of(run_dir))
        directory = RunDir.at(run_dir)
        write_run_marker(directory.root, marker)
        return directory

    def prepare(self, run_dir: str, spec: JobSpec, size: ScalingSpec, *, attempt: int) -> None:
        """Write the spec and the attempt's size, and shut out older attempts. Repeatable. Raises StaleAttempt."""
        directory = self._begin(run_dir)
        directory.write_spec(spec)
        directory.attempt(attempt).write_size(size)
        directory.write_fence(attempt)
        if directory.fence().attempt > attempt:
            raise StaleAttempt(run_dir, attempt)

    def fence_off(self, run_dir: str, *, attempt: int) -> None:
        """Shut out every attempt older than this one."""
        self._begin(run_dir).write_fence(attempt)

    def ask_to_stop(self, run_dir: str, stop: Stop) -> None:
        """Write control/stop.json."""
        self._begin(run_dir).write_stop(stop)

    def observe(self, run_dir: str, attempt: int) -> Sighting:
        """What an attempt says of itself."""
        directory = self._open(run_dir)
        folder = directory.attempt(attempt)
        training, ready, conditions = Training.NOT_YET, False, Conditions()
        for line in read_lines(folder.events):
            event = str(line.get("event"))
            training, ready = _TRAINING.get(event, training), _READY.get(event, ready)
            conditions.read(line)
        size = size_appended(folder.metrics) + size_appended(folder.events)
        return Sighting(
            training,
            folder.outcome(),
            directory.stop(),
            conditions.lost,
            size,
            ready,
            conditions.newest,
            conditions.left,
            conditions.draining,
        )

    def latest(self, run_dir: str) -> Latest:
        """The newest attempt that was prepared or shut out; number 0 where there is none."""
        directory = self._open(run_dir)
        fence = directory.fence().attempt
        prepared = max((attempt.number for attempt in directory.attempts()), default=0)
        # A fence shuts out what is older than it, prepared or not.
        number = max(prepared, fence - 1)
        return Latest(number, directory.attempt(number).size(), over=fence > number)

    def story(self, run_dir: str) -> Story:
        """What all attempts say together."""
        with self._lock:
            chronicle = self._chronicles.pop(run_dir, None) or Chronicle(RunDir.at(run_dir))
            # The one that was asked for last is forgotten last.
            self._chronicles[run_dir] = chronicle
            if len(self._chronicles) > _CHRONICLES:
                del self._chronicles[next(iter(self._chronicles))]
        self._roots.check(root_of(run_dir))
        return chronicle.tell(partial(self.tail, run_dir), now=self._clock())

    def known_story(self, run_dir: str) -> Reading:
        """The newest story, or the last one that could be read with the reason why there is no newer one."""
        try:
            return Reading(self.story(run_dir), self._clock())
        except Exception as error:
            if not storage_failed(error):
                raise
            return replace(self.last_story(run_dir), error=str(error))

    def last_story(self, run_dir: str) -> Reading:
        """The story as it was last read, without a look at the storage."""
        chronicle = self._chronicles.get(run_dir)
        return Reading(NO_STORY, None) if chronicle is None else chronicle.last

    def tail(self, run_dir: str, what: Written, place: Place) -> Tail:
        """The next whole lines of a file from a place on; a line that is still being written is not there yet."""
        directory = self._open(run_dir)
        # Attempts first: whoever sees the next one has seen all of this one.
        later = [attempt.number for attempt in directory.attempts() if attempt.number > place.attempt]
        file = _file(directory.attempt(place.attempt), what)
        # A line of a log may have no end; one of JSON means nothing in pieces.
        entries, more = _next_lines(file, place, in_pieces=what.kind == "log")
        return Tail(entries, more, min(later, default=None))

    def mark(self, run_dir: str, what: Written) -> Hashable:
        """Another value whenever there is more of a kind in any attempt; much quicker than reading it."""
        attempts = self._open(run_dir).attempts()
        return tuple((attempt.number, size_appended(_file(attempt, what))) for attempt in attempts)

    def newest_attempt(self, run_dir: str) -> int:
        """Its number; 1 where none has begun."""
        return max((attempt.number for attempt in self._open(run_dir).attempts()), default=1)

    def inherit(self, run_dir: str, parent: Parent) -> bool:
        """Have a run that has not begun go on from another one's checkpoint, and keep that; whether it is there."""
        heir = RunDir.at(run_dir)
        if not self._open(parent.run_dir).pin(parent.manifest.step, by=_pinned_by(heir)):
            return False
        self._begin(run_dir).write_parent(parent)
        return True

    def parent(self, run_dir: str) -> Parent | None:
        """Return the checkpoint of another run that a run began from; None if it began at its first step."""
        return RunDir.at(run_dir).parent()

    def let_go(self, run_dir: str) -> None:
        """Leave the checkpoint that a run was begun from to retention. Repeatable."""
        heir = self._open(run_dir)
        if (parent := heir.parent()) is not None:
            self._open(parent.run_dir).unpin(parent.manifest.step, by=_pinned_by(heir))

    def committed(self, run_dir: str) -> int | None:
        """The newest committed step."""
        return max(self._open(run_dir).manifests(), default=None)

    def checkpoints(self, run_dir: str) -> list[Checkpoint]:
        """The committed checkpoints, oldest first."""
        directory = self._open(run_dir)
        return [Checkpoint(manifest, directory.is_pinned(step)) for step, manifest in directory.manifests().items()]

    def pin(self, run_dir: str, step: int) -> bool:
        """Keep a checkpoint whatever retention says; whether it was there to be kept."""
        return self._open(run_dir).pin(step)

    def unpin(self, run_dir: str, step: int) -> None:
        """Leave a checkpoint to retention again."""
        self._open(run_dir).unpin(step)

    def exported(self, run_dir: str, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """How far an export is; None where nobody asked for it."""
        return self._open(run_dir).exports.status(step, wish, now=now)

    def write_export(self, run_dir: str, status: ExportStatus) -> None:
        """Say how far an export is."""
        self._open(run_dir).exports.write(status)


def _pinned_by(heir: RunDir) -> str:
    return f"clone-{heir.root.name}"


def _file(attempt: AttemptDir, what: Written) -> Path:
    if what.kind == "log":
        return attempt.driver_log if what.rank is None else attempt.rank_log(what.rank)
    return attempt.events if what.kind == "events" else attempt.metrics


def _next_lines(path: Path, place: Place, *, in_pieces: bool) -> tuple[tuple[Entry, ...], bool]:
    """Whole lines from a place on, a window of them at most, and whether there may be more."""
    after, length = place.offset, _WINDOW
    if size_appended(path) <= after:
        return (), False
    window = read_appended(path, after, length)
    while b"\n" not in window and len(window) == length:
        if in_pieces:
            return (Entry(window.decode(errors="replace"), replace(place, offset=after + length)),), True
        length *= 4
        window = read_appended(path, after, length)
    entries = list[Entry]()
    for line in window.split(b"\n")[:-1]:
        after += len(line) + 1
        entries.append(Entry(line.decode(errors="replace").rstrip("\r"), replace(place, offset=after)))
    return tuple(entries), len(window) == length
