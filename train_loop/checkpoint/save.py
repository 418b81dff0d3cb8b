"""Asynchronous saves: copy, write, hash and commit concurrently with training, one save at a time."""

import errno
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from train_loop.checkpoint.access import RunAccess
from train_loop.checkpoint.files.layout import Contents, TensorLocations
from train_loop.checkpoint.files.rank_writer import RankWriter
from train_loop.checkpoint.retention import retire_others
from train_loop.checkpoint.store.open import open_store
from train_loop.errors import CheckpointError, FencedError
from train_loop.liveness.fencing import check_fence
from train_loop.run_dir import (
    CheckpointFile,
    Manifest,
    is_transient,
    storage_failed,
    storage_may_fail,
    storage_seconds,
)
from train_loop.spec import CheckpointSpec, SaveMode
from train_loop.system.retry import patiently
from train_loop.telemetry.timers import StepTimer

log = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE = storage_seconds()
"""Seconds for which a save retries storage errors."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class RankFiles(NamedTuple):
    """The files of a checkpoint that a rank has made durable."""

    files: dict[str, CheckpointFile]
    objects: TensorLocations
    delay: str | None
    """Storage error that delayed this rank, for rank 0 to report; None without one, and on rank 0."""


@dataclass(frozen=True)
class SaveFailure:
    """The error of one rank in a save. Ranks send each other their failures."""

    rank: int
    reason: str
    fenced: bool = False
    """True if a newer worker group has taken over: the run must end."""

    def __str__(self) -> str:
        """Return the failure for events and errors."""
        return f"rank {self.rank}: {self.reason}"


class Saver:
    """The writer of a run's checkpoints. Every rank has a Saver and calls it at the same steps."""

    def __init__(
        self, access: RunAccess, spec: CheckpointSpec, mode: SaveMode, *, timeout: timedelta = COLLECTIVE_TIMEOUT
    ) -> None:
        self._access = access
        self._store = open_store(access.run_dir, access.token)
        self._spec = spec
        self._waits = mode == "sync"
        # A separate process group: its collectives run in a thread, concurrently with those of the loop. Its timeout
        # allows for ranks that retry their storage.
        patience = timedelta(seconds=2 * PATIENCE)
        self._group = dist.new_group(backend="gloo", timeout=timeout + patience)
        self._rank = dist.get_rank(self._group)
        self._files = RankWriter(self._group, mode)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[str | None] | None = None
        self._delay: str | None = None
        self._failed_in_a_row = 0
        self._fenced: SaveFailure | None = None

    def save(self, tensors: dict[str, Any], draft: Manifest, clock: StepTimer) -> None:
        """Start to save `tensors` with the manifest `draft`, after the previous save has finished. A collective call.

        The tensors are copied before the call returns, so that training continues. A failed save is reported as an
        event, and the run continues to the next save. Raises FencedError, and CheckpointError after too many
        consecutive failures.
        """
        self.wait()
        if self.failed_fatally:
            self.raise_fatal()
        started = perf_counter()
        contents = self._files.take(tensors, clock)
        self._last = self._thread.submit(self._finish, contents, draft, started)
        if self._waits:
            self.wait()

    def wait(self) -> str | None:
        """Wait for the save in flight. Return the last save's error or None, equal on all ranks. Raises FencedError."""
        return None if self._last is None else self._last.result()

    @property
    def failed_fatally(self) -> bool:
        """True if this rank knows of an error that must end the run; it may know slightly before the other ranks."""
        return self._fenced is not None or self._failed_in_a_row >= self._spec.max_consecutive_failures

    def raise_fatal(self) -> None:
        """Raise FencedError or CheckpointError. Call it on every rank once any rank has failed fatally."""
        error = self.wait()
        if self._fenced is not None:
            raise FencedError(self._fenced.reason)
        place = self._access.run_dir.checkpoints
        raise CheckpointError(
            f"{self._failed_in_a_row} checkpoints in a row were not committed: {error}; free space in {place} or make "
            "it writable again, or raise checkpoint.max_consecutive_failures"
        )

    def close(self) -> None:
        """Wait for the save in flight. Raises CheckpointError if the last save failed.

        Errors of the cleanup after that are only logged: they do not affect whether the checkpoint is committed.
        """
        failed = self.wait()
        for end in (self._thread.shutdown, self._files.close):
            try:
                end()
            except Exception as error:
                log.warning("cleanup after the last save failed: %s", error)
        if failed is not None:
            raise CheckpointError(failed)

    def _finish(self, contents: Contents, draft: Manifest, started: float) -> str | None:
        """Wait until the files of all ranks are durable; then commit on rank 0. All ranks return or raise the same."""
        self._delay = None
        results = self._gather(self._try_storage(draft.step, partial(self._write, draft.step, contents)))
        failures = [result for result in results if isinstance(result, SaveFailure)]
        written = [result for result in results if isinstance(result, RankFiles)]
        self._report_delays(draft.step, results)
        if not failures and self._rank == 0:
            failures = self._commit(draft, written, started)
        # Rank 0 decides. It may also have learned from an event that a newer group has taken over.
        failures = self._gather([self._fenced] if self._fenced is not None else failures)[0]
        fenced = next((failure for failure in failures if failure.fenced), None)
        if fenced is not None:
            self._fenced = fenced
            raise FencedError(fenced.reason)
        return self._count(draft.step, failures)

    def _count(self, step: int, failures: list[SaveFailure]) -> str | None:
        """Count consecutive failed saves and clean up after one. Return its error, or None after a commit."""
        if not failures:
            self._failed_in_a_row = 0
            return None
        self._failed_in_a_row += 1
        reason = "; ".join(map(str, failures))
        self._report("checkpoint_failed", step=step, reason=reason, in_a_row=self._failed_in_a_row)
        if self._rank == 0:
            self._discard(step)
        return f"the checkpoint of step {step} was not committed: {reason}"

    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks. A collective call."""
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _try_storage(self, step: int, act: Callable[[], T]) -> T | SaveFailure:
        """Return the result of a storage operation or, after retries, its error: the other ranks wait for an answer."""
        try:
            return patiently(
                act, seconds=PATIENCE, may_pass=_may_pass, on_first_failure=partial(self._report_delay, step)
            )
        except FencedError as error:
            return SaveFailure(self._rank, str(error), fenced=True)
        except Exception as error:
            return SaveFailure(self._rank, f"{type(error).__name__}: {error}")

    def _write(self, step: int, contents: Contents) -> RankFiles:
        """Make this rank's files durable."""
        # A storage error may mean that a newer attempt has removed the folder.
        check_fence(self._access.run_dir, self._access.token)
        files = self._files.write(self._store.workplace(step), contents)
        return RankFiles(files, contents.objects, self._delay)

    def _commit(self, draft: Manifest, written: list[RankFiles], started: float) -> list[SaveFailure]:
        """Commit the durable files of all ranks, and remove older checkpoints. Return the failure of the commit."""
        result = self._try_storage(draft.step, partial(self._make_checkpoint, draft, written))
        if isinstance(result, SaveFailure):
            return [result]
        seconds = round(perf_counter() - started, 3)
        self._report("checkpoint_committed", step=result.step, bytes=result.bytes, seconds=seconds)
        self._remove_older()
        return []

    def _make_checkpoint(self, draft: Manifest, written: list[RankFiles]) -> Manifest:
        # A run that resumes from this checkpoint does not repeat the lines of earlier steps.
        self._access.journal.flush()
        metadata = self._store.workplace(draft.step) / self._store.metadata_name()
        files = self._files.write_metadata(metadata, (rank.objects for rank in written))
        for rank in written:
            files |= rank.files
        return self._store.commit(draft.model_copy(update={"files": files}))

    def _remove_older(self) -> None:
        try:
            retire_others(self._access.run_dir, self._store, self._spec)
        except FencedError as error:
            self._end_by(error)
        except Exception as error:
            # Catch every error: the other ranks wait for this one.
            message = f"older checkpoints could not be removed: {error}; this is retried after the next save"
            log.warning(message)
            self._report("warning", message=message)

    def _discard(self, step: int) -> None:
        try:
            with storage_may_fail(partial(log.warning, "files of the failed save could not be removed: %s")):
                self._store.discard(step)
        except FencedError as error:
            self._end_by(error)

    def _report(self, name: str, **fields: Any) -> None:
        """Write an event."""
        try:
            self._access.journal.event(name, **fields)
        except FencedError as error:
            self._end_by(error)

    def _end_by(self, error: FencedError) -> None:
        """Remember that a newer group has taken over. All ranks learn of it at the next collective call."""
        self._fenced = SaveFailure(self._rank, str(error), fenced=True)

    def _report_delay(self, step: int, error: BaseException) -> None:
        """Log a delay. Rank 0 also writes its own event at once; other ranks' delays reach rank 0 later."""
        log.warning("storage failed and is retried: %s", error)
        reason = f"{type(error).__name__}: {error}"
        if self._rank == 0:
            self._access.journal.event("checkpoint_delayed", step=step, rank=0, reason=reason)
        else:
            self._delay = reason

    def _report_delays(self, step: int, results: list[RankFiles | SaveFailure]) -> None:
        """Report the ranks that storage has delayed."""
        for rank, result in enumerate(results):
            if isinstance(result, RankFiles) and result.delay is not None:
                self._report("checkpoint_delayed", step=step, rank=rank, reason=result.delay)


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed; a name that is taken stays taken."""
    if is_transient(error):
        return True
    taken = isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY)
    return storage_failed(error) and not taken and not isinstance(error, FileExistsError)
