"""Saving without stopping the loop: stage, write, hash and commit behind its back, one save at a time."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from train_loop.checkpoint.manifest import NAME, describe_file
from train_loop.checkpoint.retention import keep_newest, remove
from train_loop.errors import FencedError
from train_loop.journal import Journal
from train_loop.run_dir import CheckpointFile, Manifest, RunDir, sync, write_durably
from train_loop.session import Session


class SaveError(RuntimeError):
    """A checkpoint that the run cannot do without was not committed."""


class Saver:
    """Saves the checkpoints of one run; every rank has one and calls it at the same steps."""

    def __init__(self, session: Session, journal: Journal, keep_last: int, *, asynchronous: bool) -> None:
        self.run_dir = session.run_dir
        self.attempt = session.attempt
        self.journal = journal
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        # A group of its own: its collectives run in a thread beside the loop's.
        self.group = dist.new_group(backend="gloo", timeout=session.timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None
        self._fault: str | None = None

    def save(self, tensors: dict[str, Any], draft: Manifest) -> None:
        """Start saving `tensors` as what `draft` describes, once the save before it has ended; a collective call.

        The tensors are copied before it returns, so that training goes on. A save that fails is an event, and the run
        goes on towards the next one. Raises FencedError.
        """
        self.wait()
        folder = self.run_dir.checkpoint_in_progress(draft.step, self.attempt)
        started = perf_counter()
        written = async_save(tensors, storage_writer=FileSystemWriter(folder), process_group=self.group)
        self._pending = self._thread.submit(self._finish, written, folder, draft, started)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> str | None:
        """Wait for the save in flight; why the last one failed, if it did, on every rank. Raises FencedError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._fault = pending.result()
        return self._fault

    def close(self) -> None:
        """Wait for the save in flight. Raises SaveError where the last one failed."""
        fault = self.wait()
        self._thread.shutdown()
        if fault is not None:
            raise SaveError(fault)

    def _finish(self, written: Any, folder: Path, draft: Manifest, started: float) -> str | None:
        """Hear every rank say that its files are durable; then rank 0 commits. All ranks end alike."""
        words = self._tell_all(_durable_files_or_fault(written, folder, dist.get_rank(self.group)))
        fault: Any = "; ".join(dict.fromkeys(word for word in words if isinstance(word, str))) or None
        if fault is None and dist.get_rank(self.group) == 0:
            manifest = draft.model_copy(update={"files": {name: f for word in words for name, f in word.items()}})
            fault = self._commit_or_fault(folder, manifest, started)
        fault = self._tell_all(fault)[0]
        if isinstance(fault, FencedError):
            raise fault
        if fault is not None:
            self.journal.event("checkpoint_failed", step=draft.step, reason=fault)
            if dist.get_rank(self.group) == 0:
                # What is left of it may be what fills the disk.
                shutil.rmtree(folder, ignore_errors=True)
        return fault and f"the checkpoint of step {draft.step} was not committed: {fault}"

    def _tell_all(self, word: Any) -> list[Any]:
        words: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(words, word, group=self.group)
        return words

    def _commit_or_fault(self, folder: Path, manifest: Manifest, started: float) -> FencedError | str | None:
        try:
            check_fence(self.run_dir, self.attempt)
            commit(folder, self.run_dir.checkpoint(manifest.step), manifest)
            seconds = round(perf_counter() - started, 3)
            self.journal.event("checkpoint_committed", step=manifest.step, bytes=manifest.bytes, seconds=seconds)
            keep_newest(self.run_dir, self.keep_last)
        except FencedError as error:
            return error
        except OSError as error:
            return _name(error)
        return None


def check_fence(run_dir: RunDir, attempt: int) -> None:
    """Raise FencedError where a newer attempt has taken over."""
    fence = run_dir.fence()
    if fence > attempt:
        raise FencedError(f"attempt {fence} has taken over from attempt {attempt}, which ends here")


def commit(folder: Path, final: Path, manifest: Manifest) -> None:
    """Make a folder whose files are durable a checkpoint: the manifest last, then its final name."""
    write_durably(folder / NAME, manifest.model_dump_json(indent=2))
    if final.exists():
        # The run resumed from before it, so that it was rejected; what replaces it is the same step, trained again.
        remove(final)
    folder.rename(final)
    sync(final.parent)


def _durable_files_or_fault(written: Any, folder: Path, rank: int) -> dict[str, CheckpointFile] | str:
    """Sizes and hashes of the files that this rank wrote, or what went wrong: a silent rank would hang the others."""
    try:
        written.result()
        names = sorted(path.name for path in folder.glob(f"__{rank}_*"))
        if rank == 0:
            names.append(".metadata")
        for name in names:
            sync(folder / name)
        sync(folder)
        return {name: describe_file(folder / name) for name in names}
    except CheckpointException as error:  # DCP's word to every rank of what went wrong on some; no Exception
        return "; ".join(f"rank {failed}: {_name(cause)}" for failed, (cause, _) in sorted(error.failures.items()))
    except Exception as error:
        return f"rank {rank}: {_name(error)}"


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
