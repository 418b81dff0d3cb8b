"""Run directories behind a guard: no call waits longer than its deadline, and failures name the storage root."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from service.adapters.storage.roots import root_of
from service.adapters.storage.run_dirs import LocalRunDirs
from service.adapters.storage.timeouts import StorageGuard
from service.domain.jobs.observation import LatestAttempt
from service.errors import StorageAway
from service.ports import AttemptObservation, Checkpoint, LogChunk, LogOffset, LogSource, Reading, RunSummary
from train_loop.run_dir import ExportStatus, ExportWish, Parent, Stop, is_remote, storage_failed, storage_path
from train_loop.spec import AnyJobSpec, ScalingSpec

T = TypeVar("T")
_READ_SECONDS, _WRITE_SECONDS, _REMOTE_SECONDS = 2.0, 20.0, 10.0


class GuardedRunDirs:
    """A RunDirs with a guard around LocalRunDirs. Calls raise StorageAway if the storage root is unavailable.

    With `inline`, calls run in the caller's thread, after a check of the root with a deadline. This is for the
    reconciler, which limits its load by its thread's CPU time.
    """

    def __init__(self, inner: LocalRunDirs, guard: StorageGuard, *, inline: bool = False) -> None:
        self._inner = inner
        self._guard = guard
        self._inline = inline

    def prepare(self, run_dir: str, spec: AnyJobSpec, size: ScalingSpec, *, attempt: int) -> None:
        """Write the spec and the attempt's size, and fence off older attempts. Repeatable.

        Raises StaleAttempt if this attempt is fenced off, UnusableRunDir if the folder holds no spec of this run.
        """
        self._write(run_dir, partial(self._inner.prepare, run_dir, spec, size, attempt=attempt))

    def fence_off(self, run_dir: str, *, attempt: int) -> None:
        """Fence off every attempt older than this one."""
        self._write(run_dir, partial(self._inner.fence_off, run_dir, attempt=attempt))

    def request_stop(self, run_dir: str, stop: Stop) -> None:
        """Write control/stop.json."""
        self._write(run_dir, partial(self._inner.request_stop, run_dir, stop))

    def observe(self, run_dir: str, attempt: int) -> AttemptObservation:
        """Read the state of an attempt."""
        return self._read(run_dir, partial(self._inner.observe, run_dir, attempt))

    def latest(self, run_dir: str) -> LatestAttempt:
        """Return the newest attempt that was prepared or fenced off; number 0 if there is none."""
        return self._read(run_dir, partial(self._inner.latest, run_dir))

    def summary(self, run_dir: str) -> RunSummary:
        """Return the summary of all attempts."""
        return self._read(run_dir, partial(self._inner.summary, run_dir))

    def latest_summary(self, run_dir: str) -> Reading:
        """Return the current summary, or the last one read with the error that prevents a newer one."""
        try:
            self.summary(run_dir)
        except StorageAway as away:
            return replace(self._inner.last_summary(run_dir), error=away.error, since=away.since, root=away.root)
        return self._inner.last_summary(run_dir)

    def tail(self, run_dir: str, what: LogSource, place: LogOffset) -> LogChunk:
        """Return the next complete lines of a file, from `place`."""
        return self._read(run_dir, partial(self._inner.tail, run_dir, what, place))

    def mark(self, run_dir: str, what: LogSource) -> Hashable:
        """Return a value that changes whenever this file grows in any attempt."""
        return self._read(run_dir, partial(self._inner.mark, run_dir, what))

    def newest_attempt(self, run_dir: str) -> int:
        """Return the number of the newest attempt; 1 if none has started."""
        return self._read(run_dir, partial(self._inner.newest_attempt, run_dir))

    def link_parent(self, run_dir: str, parent: Parent) -> bool:
        """Pin another run's checkpoint, and let a new run start from it. Return False if it does not exist."""
        return self._write(run_dir, partial(self._inner.link_parent, run_dir, parent))

    def parent(self, run_dir: str) -> Parent | None:
        """Return the checkpoint of another run from which a run started; None if it started at its first step."""
        return self._read(run_dir, partial(self._inner.parent, run_dir))

    def release_parent(self, run_dir: str) -> None:
        """Remove the run's pin from the checkpoint that it started from. Repeatable."""
        self._write(run_dir, partial(self._inner.release_parent, run_dir))

    def trained_tokenizer(self, run_dir: str) -> str | None:
        """Return the folder of the tokenizer of a run's prepared data; None if it has none."""
        return self._read(run_dir, partial(self._inner.trained_tokenizer, run_dir))

    def committed(self, run_dir: str) -> int | None:
        """Return the newest committed step; None if there is none."""
        return self._read(run_dir, partial(self._inner.committed, run_dir))

    def checkpoints(self, run_dir: str) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first."""
        return self._read(run_dir, partial(self._inner.checkpoints, run_dir))

    def pin(self, run_dir: str, step: int) -> bool:
        """Pin a checkpoint, so that retention keeps it. Return False if it does not exist."""
        return self._write(run_dir, partial(self._inner.pin, run_dir, step))

    def unpin(self, run_dir: str, step: int) -> None:
        """Remove the pin of a checkpoint, so that retention applies to it again."""
        self._write(run_dir, partial(self._inner.unpin, run_dir, step))

    def exported(self, run_dir: str, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """Return the status of an export; None if it was not requested."""
        return self._read(run_dir, partial(self._inner.exported, run_dir, step, wish, now=now))

    def write_export(self, run_dir: str, status: ExportStatus) -> None:
        """Write the status of an export."""
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
            # On object storage, a single request may hang for half a minute although the check of the root succeeded.
            return self._guard.call(root, act, seconds=_REMOTE_SECONDS)
        self._guard.probe(root, seconds=_READ_SECONDS)
        try:
            return act()
        except Exception as error:
            if not storage_failed(error):
                raise
            raise self._guard.failed(root, error) from error
