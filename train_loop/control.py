"""What all ranks know and decide together."""

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from train_loop.batch import StepBatch
from train_loop.journal import Journal
from train_loop.parallel.mesh import Mesh
from train_loop.plan import MeshPlan, groups_across_hosts
from train_loop.run_dir import RunDir, Stop
from train_loop.vitals import StepClock, Vitals

_STOPS = [None, *(Stop(mode=mode, checkpoint=keep) for mode in ("pause", "cancel", "resize") for keep in (True, False))]


@dataclass(frozen=True)
class Agreement:
    """The same on every rank."""

    divisor: float
    """What the step's loss is divided by: how many positions have something to predict, or the sum of their weights."""
    tokens: int
    """Tokens of the whole step, padding not counted."""
    stop: Stop | None
    """What rank 0 was asked to do instead of this step."""


def who_works() -> list[dict[str, Any]]:
    """Where every rank runs, for the person who has to look there; a collective call."""
    workers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(workers, {"rank": dist.get_rank(), "host": socket.gethostname(), "pid": os.getpid()})
    return workers


def warn_of_hosts(mesh: MeshPlan, workers: list[dict[str, Any]], journal: Journal) -> None:
    """Warn of Ulysses groups that lie on several hosts: every layer's all-to-all then goes over the network."""
    found = groups_across_hosts(mesh, [worker["host"] for worker in workers])
    if found:
        named = "; ".join(f"ranks {group[0]}-{group[-1]} on {', '.join(hosts)}" for group, hosts in found.items())
        journal.warn(
            f"Ulysses groups lie on several hosts, where their all-to-all is slow: {named}; "
            f"give each host a multiple of ulysses_size={mesh.sp} workers, or choose a smaller ulysses_size"
        )


def agree(batch: StepBatch, clock: StepClock, run_dir: RunDir, mesh: Mesh) -> Agreement:
    """Hear from every rank its share of the step's tokens, and from rank 0 whether to stop."""
    # Ulysses peers hold the same samples, and tokens count once.
    divisor = batch.divisor
    # A sum of weights makes float64 of all three words, which holds the other two exactly.
    mine = torch.stack([divisor, batch.lengths.sum().to(divisor.dtype)]) * (mesh.sequence_rank == 0)
    stop = run_dir.stop() if mesh.rank == 0 else None
    code = _STOPS.index(stop and stop.model_copy(update={"deadline": None}))
    words = torch.cat([mine, mine.new_tensor([code])])
    with clock.waiting():
        dist.all_reduce(words)
        whole, tokens, code = words.tolist()
    return Agreement(whole, int(tokens), _STOPS[int(code)])


def share_vitals(mine: Vitals, mesh: Mesh) -> list[Vitals]:
    """The state of every rank; a collective call."""
    told_WN = torch.zeros(mesh.plan.world, len(mine), dtype=torch.int64, device=mesh.device)
    told_WN[mesh.rank] = torch.tensor(mine)
    dist.all_reduce(told_WN)
    return [Vitals(*rank) for rank in told_WN.tolist()]
