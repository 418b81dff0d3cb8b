"""Asynchronous saves: copy, write, hash and commit concurrently with training, one save at a time."""

import errno
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from train_loop.checkpoint.access import RunAccess
from train_loop.checkpoint.files.layout import Contents, FileLayout, TensorLocations
from train_loop.checkpoint.files.staging import StagingBuffer
from train_loop.checkpoint.files.writer import FileWriter, OwnWriter, ProcessWriter, write_files
from train_loop.checkpoint.retention import retire_others
from train_loop.checkpoint.store.base import CheckpointStore
from train_loop.checkpoint.store.open import open_store
from train_loop.errors import CheckpointError, FencedError
from train_loop.liveness.fencing import check_fence
from train_loop.run_dir import (
    CheckpointFile,
    Manifest,
    is_remote,
    is_transient,
    storage_failed,
    storage_may_fail,
    storage_seconds,
    sync,
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


class Saver:
    """The writer of a run's checkpoints. Every rank has a Saver and calls it at the same steps."""

    def __init__(
        self, access: RunAccess, spec: CheckpointSpec, mode: SaveMode, *, timeout: timedelta = COLLECTIVE_TIMEOUT
    ) -> None:
        self._run_dir = access.run_dir
        self._token = access.token
        self._ledger: CheckpointStore = open_store(access.run_dir, access.token)
        self._journal = access.journal
        self._spec = spec
        self._mode = mode
        # A separate process group: its collectives run in a thread, concurrently with those of the loop. Its timeout
        # allows for ranks that retry their storage.
        patience = timedelta(seconds=2 * PATIENCE)
        self._group = dist.new_group(backend="gloo", timeout=timeout + patience)
        self._rank = dist.get_rank(self._group)
        self._buffer = StagingBuffer(shared=mode == "process") if mode != "sync" or torch.cuda.is_available() else None
        self._image = FileLayout(self._group, self._buffer)
        shared = self._buffer.descriptor if self._buffer is not None else None
        self._writer: FileWriter = OwnWriter() if shared is None else ProcessWriter(shared)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None
        self._fault: str | None = None
        self._delay: str | None = None
        self._failed_in_a_row = 0
        self._fenced: FencedError | None = None

    def save(self, tensors: dict[str, Any], draft: Manifest, clock: StepTimer) -> None:
        """Start to save `tensors` with the manifest `draft`, after the previous save has finished. A collective call.

        The tensors are copied before the call returns, so that training continues. A failed save is reported as an
        event, and the run continues to the next save. Raises FencedError, and CheckpointError after too many
        consecutive failures.
        """
        self.wait()
        if self.in_trouble:
            self.raise_trouble()
        started = perf_counter()
        contents = self._image.take(tensors, clock)
        self._pending = self._thread.submit(self._finish, contents, draft, started)
        if self._mode == "sync":
            self.wait()

    def wait(self) -> str | None:
        """Wait for the save in flight. Return the last save's error or None, equal on all ranks. Raises FencedError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._fault = pending.result()
        return self._fault

    @property
    def in_trouble(self) -> bool:
        """True if this rank knows of an error that must end the run; it may know slightly before the other ranks."""
        return self._fenced is not None or self._failed_in_a_row >= self._spec.max_consecutive_failures

    def raise_trouble(self) -> None:
        """Raise FencedError or CheckpointError. Call it on every rank once any rank is in trouble."""
        fault = self.wait()
        if self._fenced is not None:
            raise self._fenced
        raise CheckpointError(
            f"{self._failed_in_a_row} checkpoints in a row were not committed: {fault}; make the storage writable "
            "again, or raise checkpoint.max_consecutive_failures"
        )

    def close(self) -> None:
        """Wait for the save in flight. Raises CheckpointError if the last save failed.

        Errors of the cleanup after that are only logged: they do not affect whether the checkpoint is committed.
        """
        fault = self.wait()
        for end in (self._thread.shutdown, self._writer.close, self._buffer.close if self._buffer else None):
            try:
                if end is not None:
                    end()
            except Exception as error:
                log.warning("cleanup after the last save failed: %s", error)
        if fault is not None:
            raise CheckpointError(fault)

    def _finish(self, contents: Contents, draft: Manifest, started: float) -> str | None:
        """Wait until the files of all ranks are durable; then commit on rank 0. All ranks return or raise the same."""
        self._delay = None
        told = self._tell_all(self._or_fault(draft.step, partial(self._write, draft.step, contents)))
        faults = [word for word in told if not isinstance(word, RankFiles)]
        for rank, word in enumerate(told):
            if isinstance(word, RankFiles) and word.delay is not None:
                self._report("checkpoint_delayed", step=draft.step, rank=rank, reason=word.delay)
        fault = next((word for word in faults if isinstance(word, FencedError)), "; ".join(map(str, faults)) or None)
        if fault is None and self._rank == 0:
            committed = self._or_fault(draft.step, partial(self._commit, draft, told))
            if isinstance(committed, Manifest):
                self._tell_commit(committed, perf_counter() - started)
            else:
                fault = committed
        fault = self._tell_all(self._fenced or fault)[0]
        if isinstance(fault, FencedError):
            self._fenced = fault
            raise fault
        self._failed_in_a_row = 0 if fault is None else self._failed_in_a_row + 1
        if fault is None:
            return None
        self._report("checkpoint_failed", step=draft.step, reason=fault, in_a_row=self._failed_in_a_row)
        if self._rank == 0:
            self._discard(draft.step)
        return f"the checkpoint of step {draft.step} was not committed: {fault}"

    def _report(self, name: str, **fields: Any) -> None:
        """Write an event. If a newer group has taken over, all ranks learn of it at the next collective call."""
        try:
            self._journal.event(name, **fields)
        except FencedError as error:
            self._fenced = error

    def _discard(self, step: int) -> None:
        try:
            with storage_may_fail(partial(log.warning, "files of the failed save could not be removed: %s")):
                self._ledger.discard(step)
        except FencedError as error:
            self._fenced = error

    def _tell_all(self, word: Any) -> list[Any]:
        words: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(words, word, group=self._group)
        return words

    def _or_fault(self, step: int, act: Callable[[], T]) -> T | FencedError | str:
        """Return the result of a storage operation or, after retries, its error: the other ranks wait for an answer."""
        try:
            return patiently(act, seconds=PATIENCE, may_pass=_may_pass, told=partial(self._tell_delay, step))
        except FencedError as error:
            return error
        except Exception as error:
            return f"rank {self._rank}: {type(error).__name__}: {error}"

    def _write(self, step: int, contents: Contents) -> RankFiles:
        """Make this rank's files durable."""
        # A storage error may mean that a newer attempt has removed the folder.
        check_fence(self._run_dir, self._token)
        folder = self._ledger.workplace(step)
        try:
            files = self._writer.write(folder, contents.files)
            if not is_remote(folder):
                sync(folder)
        except OSError:
            # Delete partial files: they may have filled the disk. Object uploads are atomic.
            if not is_remote(folder):
                for name in contents.files:
                    (folder / name).unlink(missing_ok=True)
            raise
        return RankFiles(files, contents.objects, self._delay)

    def _commit(self, draft: Manifest, shares: list[RankFiles]) -> Manifest:
        # A run that resumes from this checkpoint does not repeat the lines of earlier steps.
        self._journal.flush()
        folder = self._ledger.workplace(draft.step)
        metadata = self._image.metadata(share.objects for share in shares)
        files = write_files(folder, {self._ledger.metadata_name(): [memoryview(metadata)]})
        for share in shares:
            files |= share.files
        return self._ledger.commit(draft.model_copy(update={"files": files}))

    def _tell_commit(self, manifest: Manifest, seconds: float) -> None:
        numbers = {"step": manifest.step, "bytes": manifest.bytes, "seconds": round(seconds, 3)}
        self._report("checkpoint_committed", **numbers)
        try:
            retire_others(self._run_dir, self._ledger, self._spec)
        except FencedError as error:
            self._fenced = error
        except Exception as error:
            # Catch every error: the other ranks wait for this one.
            told = f"older checkpoints could not be removed: {error}; this is retried after the next save"
            log.warning(told)
            self._report("warning", message=told)

    def _tell_delay(self, step: int, error: BaseException) -> None:
        """Log a delay. Rank 0 also writes its own event at once; other ranks' delays reach rank 0 later."""
        log.warning("storage failed and is retried: %s", error)
        reason = f"{type(error).__name__}: {error}"
        if self._rank == 0:
            self._journal.event("checkpoint_delayed", step=step, rank=0, reason=reason)
        else:
            self._delay = reason


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed; a name that is taken stays taken."""
    if is_transient(error):
        return True
    taken = isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY)
    return storage_failed(error) and not taken and not isinstance(error, FileExistsError)
