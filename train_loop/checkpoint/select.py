"""Selection of the checkpoint to resume from: the newest that verifies. All ranks share the hashing."""

import errno
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from train_loop.checkpoint.access import RunAccess
from train_loop.checkpoint.manifest import verify
from train_loop.checkpoint.store.open import open_store
from train_loop.errors import CheckpointError, UserError
from train_loop.liveness.fencing import check_fence
from train_loop.run_dir import Manifest, Parent, RunDir, UnknownFormatError, is_remote, storage_failed
from train_loop.system.retry import patiently

T = TypeVar("T")


def agree_on_newest(access: RunAccess) -> Manifest | None:
    """Return the newest checkpoint that verifies, the same on all ranks, which share the hashing.

    Damaged checkpoints are quarantined: retention counts by step, and would keep them instead of good ones. Raises
    OSError on every rank if the only checkpoints left are unreadable: they may be intact, so the run must not start
    from scratch.
    """
    rejected: dict[int, list[str]] = {}
    newest, unreadable = None, None
    for manifest in _call_on_rank_0(access, partial(_candidates, access)):
        found = _faults(access, access.run_dir, manifest)
        errors = [faults for faults in found if isinstance(faults, Exception)]
        lasting = next((error for error in errors if not _is_damage(access, error)), None)
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
    _call_on_rank_0(access, partial(_reject, access, rejected))
    return newest


def prove_newest(access: RunAccess) -> None:
    """Verify the newest checkpoint again, with all ranks. Raises CheckpointError on every rank if it is damaged."""
    newest = _call_on_rank_0(access, lambda: next(reversed(access.run_dir.manifests().values()), None))
    if newest is None:
        return
    found = _faults(access, access.run_dir, newest)
    faults = list(itertools.chain.from_iterable([str(f)] if isinstance(f, Exception) else f for f in found))
    if faults:
        raise CheckpointError(f"the checkpoint of step {newest.step}, just committed, is damaged: {'; '.join(faults)}")


def prove_parent(access: RunAccess, parent: Parent) -> Path:
    """Verify the parent run's checkpoint with all ranks, and return its folder.

    Raises UserError on every rank if it is damaged or missing: this run has no other checkpoint to start from.
    """
    step, run_dir = parent.manifest.step, RunDir.at(parent.run_dir)
    found = _faults(access, run_dir, parent.manifest)
    for error in found:
        if isinstance(error, Exception):
            raise error
    faults = [fault for faults in found if not isinstance(faults, Exception) for fault in faults]
    if faults:
        raise UserError(
            f"the checkpoint of step {step} of {parent.job}, from which this run starts, is damaged: "
            f"{'; '.join(faults)}; clone the job from another checkpoint"
        )
    return run_dir.checkpoint(step)


def _faults(access: RunAccess, run_dir: RunDir, manifest: Manifest) -> list[list[str] | Exception]:
    """Return the result of `faults_of_share` of every rank. A collective call."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, faults_of_share(access, run_dir, manifest))
    return found


def faults_of_share(access: RunAccess, run_dir: RunDir, manifest: Manifest) -> list[str] | Exception:
    """Return the faults in this rank's share of a checkpoint's files, or the error that prevented the check.

    The error is returned, not raised, so that all ranks learn of it.
    """
    by_size = sorted(manifest.files, key=lambda name: manifest.files[name].size, reverse=True)
    mine = by_size[dist.get_rank() :: dist.get_world_size()]
    check = partial(verify, run_dir.checkpoint(manifest.step), manifest, mine)
    try:
        return _patiently(access, check)
    except Exception as error:
        return error


def _is_damage(access: RunAccess, error: Exception) -> bool:
    """Return whether an error is a local disk's I/O error; fsspec's packages use its errno for failed requests."""
    return getattr(error, "errno", None) == errno.EIO and not is_remote(access.run_dir.root)


def _unread(error: Exception) -> list[str]:
    return [f"{getattr(error, 'filename', None) or 'a file'} cannot be read: {getattr(error, 'strerror', error)}"]


def _reject(access: RunAccess, faults: dict[int, list[str]]) -> None:
    ledger = open_store(access.run_dir, access.token)
    while faults:
        # Report first: a crash in between repeats the event, but cannot lose it.
        step, found = next(iter(faults.items()))
        access.journal.event("checkpoint_rejected", step=step, reason="; ".join(found))
        ledger.put_aside(step)
        del faults[step]


def _candidates(access: RunAccess) -> list[Manifest]:
    """Check the fence, clean up, and return the manifests of all checkpoints, newest first."""
    run_dir, token = access.run_dir, access.token
    check_fence(run_dir, token)
    ledger = open_store(run_dir, token)
    try:
        damaged = ledger.clear()
    except UnknownFormatError as error:
        raise UserError(str(error)) from error
    _reject(access, {step: ["its manifest is missing or damaged"] for step in damaged})
    return [manifest for _, manifest in sorted(run_dir.manifests().items(), reverse=True)]


def _patiently(access: RunAccess, call: Callable[[], T]) -> T:
    return patiently(call, seconds=access.patience, may_pass=storage_failed)


def _call_on_rank_0(access: RunAccess, call: Callable[[], T]) -> T:
    """Run `call` on rank 0, and return its result or raise its error on every rank."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = _patiently(access, call)
        except Exception as error:
            # Send the error: the other ranks wait for an answer.
            answer[0] = error
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: T = answer[0]
    return found
