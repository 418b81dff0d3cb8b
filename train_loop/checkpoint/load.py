"""Resuming: the newest checkpoint that verifies, loaded at any world size."""

import pickle

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.assemble import Run
from train_loop.checkpoint.contents import put_back, rng_key, tensors_of
from train_loop.checkpoint.manifest import newest_verified
from train_loop.checkpoint.retention import remove_leftovers
from train_loop.journal import Journal
from train_loop.run_dir import Manifest, RunDir
from train_loop.state import seed_generators, set_rng_state


def restore(run: Run) -> None:
    """Bring a fresh run to the newest checkpoint that verifies, or leave it at its start; a collective call.

    A newer one that does not verify is reported and passed over. Nothing is unpickled before its hash was checked.
    """
    state, run_dir = run.state, run.session.run_dir
    manifest = _agree_on_newest(run_dir, run.journal)
    seed_generators(run.spec.training.seed, step=manifest.step if manifest else 0, rank=run.mesh.rank)
    if manifest is None:
        return
    values = tensors_of(state)
    # Generators belong to ranks: with another number of them, they start anew from (seed, step, rank).
    same_world = manifest.world == dist.get_world_size()
    if same_world:
        values[rng_key(run.mesh.rank)] = b""
    try:
        load(values, checkpoint_id=run_dir.checkpoint(manifest.step))
    except CheckpointException as error:  # no Exception, so that nobody would log it
        raise RuntimeError(f"the checkpoint of step {manifest.step} verifies and does not load: {error}") from error
    put_back(state, values)
    if same_world:
        set_rng_state(pickle.loads(values[rng_key(run.mesh.rank)]))
    state.step, state.tokens = manifest.step, manifest.tokens
    state.consumed = run.order.order.consumed(manifest.position)


def _agree_on_newest(run_dir: RunDir, journal: Journal) -> Manifest | None:
    answer: list[Manifest | None] = [None]
    if dist.get_rank() == 0:
        remove_leftovers(run_dir)
        answer[0], rejected = newest_verified(run_dir)
        for step, faults in rejected.items():
            journal.event("checkpoint_rejected", step=step, reason="; ".join(faults))
    dist.broadcast_object_list(answer, src=0)
    return answer[0]
