"""Run directories behind a guard: no call waits longer than its deadline, and failures name the storage root."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from service.adapters.roots import root_of
from service.adapters.run_dirs import LocalRunDirs
from service.adapters.storage_guard import StorageGuard
from service.domain.decide import Latest
from service.errors import StorageAway
from service.ports import Checkpoint, Place, Reading, Sighting, Story, Tail, Written
from train_loop.run_dir import ExportStatus, ExportWish, Parent, Stop, is_remote, storage_failed, storage_path
from train_loop.spec import JobSpec, ScalingSpec

T = TypeVar("T")
_READ_SECONDS, _WRITE_SECONDS, _REMOTE_SECONDS = 2.0, 20.0, 10.0


class GuardedRunDirs:
    """The port RunDirs over LocalRunDirs. Each call raises StorageAway if the storage root is unavailable.

    With `inline`, calls run in the caller's thread after a look at the root with a deadline: for the reconciler, which
    limits its load by the CPU time of its own thread.
    """

    def __init__(self, inner: LocalRunDirs, guard: StorageGuard, *, inline: bool = False) -> None:
        self._inner = inner
        self._guard = guard
        self._inline = inline

    def prepare(self, run_dir: str, spec: JobSpec, size: ScalingSpec, *, attempt: int) -> None:
        """Write the spec and the attempt's size, and shut out older attempts. Repeatable. Raises StaleAttempt."""
        self._write(run_dir, partial(self._inner.prepare, run_dir, spec, size, attempt=attempt))

    def fence_off(self, run_dir: str, *, attempt: int) -> None:
        """Shut out every attempt older than this one."""
        self._write(run_dir, partial(self._inner.fence_off, run_dir, attempt=attempt))

    def ask_to_stop(self, run_dir: str, stop: Stop) -> None:
        """Write control/stop.json."""
        self._write(run_dir, partial(self._inner.ask_to_stop, run_dir, stop))

    def observe(self, run_dir: str, attempt: int) -> Sighting:
        """Return what an attempt says of itself."""
        return self._read(run_dir, partial(self._inner.observe, run_dir, attempt))

    def latest(self, run_dir: str) -> Latest:
        """Return the newest attempt that was prepared or shut out; number 0 if there is none."""
        return self._read(run_dir, partial(self._inner.latest, run_dir))

    def story(self, run_dir: str) -> Story:
        """Return what all attempts say together."""
        return self._read(run_dir, partial(self._inner.story, run_dir))

    def known_story(self, run_dir: str) -> Reading:
        """Return the newest story, or the last one that could be read with the reason why there is no newer one."""
        try:
            self.story(run_dir)
        except StorageAway as away:
            return replace(self._inner.last_story(run_dir), error=away.error, since=away.since, root=away.root)
        return self._inner.last_story(run_dir)

    def tail(self, run_dir: str, what: Written, place: Place) -> Tail:
        """Return the next whole lines of a file from a place on."""
        return self._read(run_dir, partial(self._inner.tail, run_dir, what, place))

    def mark(self, run_dir: str, what: Written) -> Hashable:
        """Return another value whenever there is more of a kind in any attempt."""
        return self._read(run_dir, partial(self._inner.mark, run_dir, what))

    def newest_attempt(self, run_dir: str) -> int:
        """Return the number of the newest attempt; 1 if none has begun."""
        return self._read(run_dir, partial(self._inner.newest_attempt, run_dir))

    def inherit(self, run_dir: str, parent: Parent) -> bool:
        """Have a run that has not begun continue from another one's checkpoint, and pin that."""
        return self._write(run_dir, partial(self._inner.inherit, run_dir, parent))

    def parent(self, run_dir: str) -> Parent | None:
        """Return the checkpoint of another run that a run began from; None if it began at its first step."""
        return self._read(run_dir, partial(self._inner.parent, run_dir))

    def let_go(self, run_dir: str) -> None:
        """Leave the checkpoint that a run was begun from to retention. Repeatable."""
        self._write(run_dir, partial(self._inner.let_go, run_dir))

    def committed(self, run_dir: str) -> int | None:
        """Return the newest committed step."""
        return self._read(run_dir, partial(self._inner.committed, run_dir))

    def checkpoints(self, run_dir: str) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first."""
        return self._read(run_dir, partial(self._inner.checkpoints, run_dir))

    def pin(self, run_dir: str, step: int) -> bool:
        """Keep a checkpoint whatever retention says; return whether it was there to be kept."""
        return self._write(run_dir, partial(self._inner.pin, run_dir, step))

    def unpin(self, run_dir: str, step: int) -> None:
        """Leave a checkpoint to retention again."""
        self._write(run_dir, partial(self._inner.unpin, run_dir, step))

    def exported(self, run_dir: str, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """Return the progress of an export; None if nobody asked for it."""
        return self._read(run_dir, partial(self._inner.exported, run_dir, step, wish, now=now))

    def write_export(self, run_dir: str, status: ExportStatus) -> None:
        """Write the progress of an export."""
        self._write(run_dir, partial(self._inner.write_export, run_dir, status))

    def _read(self, run_dir: str, act: Callable[[], T]) -> T:
        return self._call(run_dir, act, _READ_SECONDS)

    def _write(self, run_dir: str, act: Callable[[], T]) -> T:
        return self._call(run_dir, act, _WRITE_SECONDS)

    def _call(self, run_dir: str, act: Callable[[], T], seconds: float) -> T:
        root = root_of(run_dir)
        if not self._inline:
            return self._guard.call(root, act, seconds=seconds)
        if is_remote(storage_path(run_dir)):
            # One request of many may hang there for half a minute, whatever the look at the root found.
            return self._guard.call(root, act, seconds=_REMOTE_SECONDS)
        self._guard.probe(root, seconds=_READ_SECONDS)
        try:
            return act()
        except Exception as error:
            if not storage_failed(error):
                raise
            raise self._guard.failed(root, error) from error
