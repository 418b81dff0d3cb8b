"""Which checkpoint all ranks resume from: the newest that verifies, the hashing shared out over all of them."""

import errno
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from train_loop.checkpoint.manifest import verify
from train_loop.checkpoint.store.open import ledger_of
from train_loop.errors import CheckpointError, UserError
from train_loop.liveness.fencing import check_fence
from train_loop.loop.build import Run
from train_loop.run_dir import Manifest, Parent, RunDir, UnknownFormatError, is_remote, storage_failed
from train_loop.system.retry import patiently

T = TypeVar("T")


def agree_on_newest(run: Run) -> Manifest | None:
    """The newest checkpoint that verifies, the hashing shared out over all ranks; damaged ones are put aside.

    Aside, because retention counts by step, and would keep one that is of no use instead of a good one. Raises OSError,
    on every rank, where what cannot be read is all there is: it may be whole, and nobody should start anew beside it.
    """
    rejected: dict[int, list[str]] = {}
    newest, unreadable = None, None
    for manifest in _ask_rank_0(run, partial(_candidates, run)):
        found = _faults(run, run.session.run_dir, manifest)
        errors = [faults for faults in found if isinstance(faults, Exception)]
        lasting = next((error for error in errors if not _says_damage(run, error)), None)
        if lasting is not None:
            raise lasting
        unreadable = unreadable or next(iter(errors), None)
        faults = list(itertools.chain.from_iterable(_unread(f) if isinstance(f, Exception) else f for f in found))
        if not faults:
            newest = manifest
            break
        rejected[manifest.step] = faults
    if newest is None and unreadable is not None:
        raise unreadable
    _ask_rank_0(run, partial(_reject, run, rejected))
    return newest


def prove_newest(run: Run) -> None:
    """Read the newest checkpoint once more, by all ranks. Raises CheckpointError on each where it is damaged."""
    newest = _ask_rank_0(run, lambda: next(reversed(run.session.run_dir.manifests().values()), None))
    if newest is None:
        return
    found = _faults(run, run.session.run_dir, newest)
    faults = list(itertools.chain.from_iterable([str(f)] if isinstance(f, Exception) else f for f in found))
    if faults:
        raise CheckpointError(f"the checkpoint of step {newest.step}, just committed, is damaged: {'; '.join(faults)}")


def prove_parent(run: Run, parent: Parent) -> Path:
    """The folder of the checkpoint of another run that this one goes on from, once all ranks have read it.

    Raises UserError on each where it is damaged or gone: this run has nothing else to go on from.
    """
    step, run_dir = parent.manifest.step, RunDir.at(parent.run_dir)
    found = _faults(run, run_dir, parent.manifest)
    for error in found:
        if isinstance(error, Exception):
            raise error
    faults = [fault for faults in found if not isinstance(faults, Exception) for fault in faults]
    if faults:
        raise UserError(
            f"the checkpoint of step {step} of {parent.job}, from which this run goes on, is damaged: "
            f"{'; '.join(faults)}; clone the job from another one"
        )
    return run_dir.checkpoint(step)


def _faults(run: Run, run_dir: RunDir, manifest: Manifest) -> list[list[str] | Exception]:
    """What each rank found; a collective call."""
    found: list[Any] = [None] * run.session.world
    dist.all_gather_object(found, faults_of_share(run, run_dir, manifest))
    return found


def faults_of_share(run: Run, run_dir: RunDir, manifest: Manifest) -> list[str] | Exception:
    """What is wrong with this rank's share of a checkpoint's files, or why it cannot be told: all ranks must hear."""
    by_size = sorted(manifest.files, key=lambda name: manifest.files[name].size, reverse=True)
    mine = by_size[run.mesh.rank :: run.session.world]
    look = partial(verify, run_dir.checkpoint(manifest.step), manifest, mine)
    try:
        return _patiently(run, look)
    except Exception as error:
        return error


def _says_damage(run: Run, error: Exception) -> bool:
    """Whether it is the word of a broken disk; fsspec's packages say the same of requests that went wrong."""
    return getattr(error, "errno", None) == errno.EIO and not is_remote(run.session.run_dir.root)


def _unread(error: Exception) -> list[str]:
    return [f"{getattr(error, 'filename', None) or 'a file'} cannot be read: {getattr(error, 'strerror', error)}"]


def _reject(run: Run, faults: dict[int, list[str]]) -> None:
    ledger = ledger_of(run.session.run_dir, run.session.token)
    while faults:
        # Said before it is done, and perhaps again, rather than done and never said.
        step, found = next(iter(faults.items()))
        run.journal.event("checkpoint_rejected", step=step, reason="; ".join(found))
        ledger.put_aside(step)
        del faults[step]


def _candidates(run: Run) -> list[Manifest]:
    """What claims to be a checkpoint, newest first, after a look at the fence and a clean-up, in this order."""
    run_dir, token = run.session.run_dir, run.session.token
    check_fence(run_dir, token)
    ledger = ledger_of(run_dir, token)
    try:
        damaged = ledger.clear()
    except UnknownFormatError as error:
        raise UserError(str(error)) from error
    _reject(run, {step: ["its manifest is missing or damaged"] for step in damaged})
    return [manifest for _, manifest in sorted(run_dir.manifests().items(), reverse=True)]


def _patiently(run: Run, call: Callable[[], T]) -> T:
    return patiently(call, seconds=run.session.patience, may_pass=storage_failed)


def _ask_rank_0(run: Run, question: Callable[[], T]) -> T:
    """What rank 0 finds, or the error that it met, on every rank."""
    answer: list[Any] = [None]
    if run.mesh.rank == 0:
        try:
            answer[0] = _patiently(run, question)
        except Exception as error:
            # Nobody may wait for rank 0 in vain.
            answer[0] = error
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: T = answer[0]
    return found
