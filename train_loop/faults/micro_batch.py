"""The micro-batch of a run with `per_device_train_batch_size: auto`.

Each worker group takes that of the group before it. The first takes the largest that fits by the plan, and its first
step is the proof. Ranks that run out of memory leave their collectives, so that the whole group starts again with the
next smaller size. The events of the run have every choice.
"""

import logging
import os
import socket
from functools import partial

import torch
import torch.distributed as dist

from train_loop.faults.memory_events import groups_without_memory
from train_loop.faults.micro_batch_choices import CHOSEN, choices
from train_loop.loop.session import Session
from train_loop.model.folder import model_shape
from train_loop.plan import WORKER_MEMORY_VARIABLE, MicroBatch, ModelShape, RankMemory, choose_micro_batch, sized
from train_loop.spec import AUTO, MEMORY, JobSpec
from train_loop.system.memory_limit import host_bytes, is_limited
from train_loop.system.retry import retry_storage

log = logging.getLogger(__name__)


def with_micro_batch(spec: JobSpec, session: Session) -> JobSpec:
    """Return a spec whose micro-batch is a number, the same on all ranks. A collective call."""
    if spec.training.per_device_train_batch_size != AUTO:
        return spec
    # An error in the model's config is raised on all ranks.
    shape, memory = model_shape(spec.model), _smallest(spec, session)
    found: list[MicroBatch | None] = [None]
    if session.rank == 0:
        found = [retry_storage(partial(_choose, spec, shape, session, memory), seconds=session.patience)]
    dist.broadcast_object_list(found, src=0)
    (chosen,) = found
    assert chosen is not None, "rank 0 sends its choice"
    log.info("micro-batches of %d sequences: %s", chosen.size, chosen.because)
    session.journal.event(
        CHOSEN,
        size=chosen.size,
        device=chosen.device,
        workers=chosen.workers,
        because=chosen.because,
        memory_bytes=memory.bytes,
    )
    return sized(spec, chosen.size)


def _choose(spec: JobSpec, shape: ModelShape, session: Session, memory: RankMemory) -> MicroBatch:
    run_dir = session.run_dir
    made, committed = choices(run_dir), max(run_dir.checkpoint_folders(), default=None)
    without = groups_without_memory(run_dir, committed)
    *_, before = made.values() or (None,)
    failed = {made[group].size for group in without if group in made and made[group].device == memory.device}
    return choose_micro_batch(spec, shape, memory, before=before, failed=failed)


def _smallest(spec: JobSpec, session: Session) -> RankMemory:
    """Return the memory of the rank that has the least."""
    hosts = [""] * session.world
    dist.all_gather_object(hosts, socket.gethostname())
    measure = session.rank_memory or measure_memory
    found: list[RankMemory | None] = [None] * session.world
    dist.all_gather_object(found, measure(spec, hosts.count(socket.gethostname())))
    return min((one for one in found if one is not None), key=lambda one: (one.bytes, one.device))


def measure_memory(spec: JobSpec, ranks: int) -> RankMemory:
    """Return the memory of this rank: of its GPU, or its limit or share of a host on which `ranks` run."""
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        return RankMemory(facts.name, facts.total_memory, on_gpu=True)
    reserved = spec.scaling.resources_per_worker.get(MEMORY)
    if is_limited(os.environ) and reserved is not None:
        return RankMemory("cpu", int(reserved), on_gpu=False)
    room = int(os.environ[WORKER_MEMORY_VARIABLE]) if is_limited(os.environ) else host_bytes()
    return RankMemory("cpu", room // ranks, on_gpu=False)
