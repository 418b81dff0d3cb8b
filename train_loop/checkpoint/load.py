"""Resuming: the newest checkpoint that verifies, loaded at any world size."""

import errno
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.assemble import Run
from train_loop.checkpoint.contents import put_back, rng_key, tensors_of
from train_loop.checkpoint.ledger import check_fence
from train_loop.checkpoint.ledgers import ledger_of
from train_loop.checkpoint.manifest import verify
from train_loop.checkpoint.read import CheckpointReader
from train_loop.errors import DataError
from train_loop.patience import patiently
from train_loop.run_dir import Manifest, storage_failed
from train_loop.state import seed_generators, set_rng_state

PATIENCE = 300.0
"""Seconds for which storage may fail before a resume gives up."""


def restore(run: Run) -> None:
    """Bring a fresh run to the newest checkpoint that verifies, or leave it at its start; a collective call.

    A newer one that does not verify is reported and passed over. Nothing is unpickled before its hash was checked.
    """
    state, run_dir = run.state, run.session.run_dir
    manifest = _agree_on_newest(run)
    seed_generators(run.spec.training.seed, step=manifest.step if manifest else 0, rank=run.mesh.rank)
    if manifest is None:
        return
    _check_same_data(run, manifest)
    values = tensors_of(state)
    # Generators belong to ranks: with another number of them, they start anew from (seed, step, rank).
    same_world = manifest.world == dist.get_world_size()
    if same_world:
        values[rng_key(run.mesh.rank)] = b""
    try:
        load(values, storage_reader=CheckpointReader(run_dir.checkpoint(manifest.step)))
    except CheckpointException as error:  # no Exception, so that nobody would log it
        raise RuntimeError(f"the checkpoint of step {manifest.step} verifies and does not load: {error}") from error
    put_back(state, values)
    if same_world:
        set_rng_state(pickle.loads(values[rng_key(run.mesh.rank)]))
    state.step, state.tokens, state.skipped = manifest.step, manifest.tokens, manifest.skipped
    state.consumed = run.order.order.consumed(manifest.position)


def _check_same_data(run: Run, manifest: Manifest) -> None:
    if manifest.dataset != run.dataset.fingerprint:
        raise DataError(
            f"the checkpoint of step {manifest.step} was trained on dataset {manifest.dataset[:12]} and this run reads "
            f"{run.dataset.fingerprint[:12]}; a position in one means nothing in the other, so put the files back or "
            "start a new run"
        )


def _agree_on_newest(run: Run) -> Manifest | None:
    """The newest checkpoint that verifies, the hashing shared out over all ranks; rejected ones are put aside.

    Aside, because retention counts by step, and would keep one that is of no use instead of a good one.
    """
    look = partial(patiently, partial(_candidates, run), seconds=PATIENCE, may_pass=storage_failed)
    for manifest in _ask_rank_0(look):
        faults: list[Any] = [None] * run.session.world
        dist.all_gather_object(faults, _faults_of_share(run, manifest))
        unread = next((found for found in faults if isinstance(found, Exception)), None)
        if unread is not None:
            # What nobody can read now may be whole.
            raise unread
        rejected = list(itertools.chain.from_iterable(faults))
        if not rejected:
            return manifest
        if run.mesh.rank == 0:
            run.journal.event("checkpoint_rejected", step=manifest.step, reason="; ".join(rejected))
            ledger_of(run.session.run_dir, run.session.attempt).put_aside(manifest.step)
    return None


def _faults_of_share(run: Run, manifest: Manifest) -> list[str] | Exception:
    """What is wrong with this rank's share of a checkpoint's files, or why it cannot be told: all ranks must hear."""
    mine = list(manifest.files)[run.mesh.rank :: run.session.world]
    look = partial(verify, run.session.run_dir.checkpoint(manifest.step), manifest, mine)
    try:
        return patiently(look, seconds=PATIENCE, may_pass=storage_failed)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            return [f"{error.filename or 'a file'} cannot be read: {error.strerror}"]
        return error


def _candidates(run: Run) -> list[Manifest]:
    """What claims to be a checkpoint, newest first, after a look at the fence and a clean-up, in this order."""
    run_dir, attempt = run.session.run_dir, run.session.attempt
    check_fence(run_dir, attempt)
    ledger = ledger_of(run_dir, attempt)
    for step in ledger.clear():
        run.journal.event("checkpoint_rejected", step=step, reason="its manifest is missing or damaged")
        ledger.put_aside(step)
    return [manifest for _, manifest in sorted(run_dir.manifests().items(), reverse=True)]


def _ask_rank_0(question: Callable[[], list[Manifest]]) -> list[Manifest]:
    """What rank 0 finds, or the error that it met, on every rank."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = question()
        except Exception as error:
            # Nobody may wait for rank 0 in vain.
            answer[0] = error
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: list[Manifest] = answer[0]
    return found
