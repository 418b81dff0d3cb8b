"""What all ranks know and decide together."""

import logging
import os
import socket
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from train_loop.loop.batch import StepBatch
from train_loop.loop.session import Session
from train_loop.parallel.mesh import Mesh
from train_loop.plan import MeshPlan, groups_across_hosts
from train_loop.run_dir import Stop, is_remote, storage_may_fail
from train_loop.system.limited_log import LimitedLog
from train_loop.telemetry.event_log import Journal
from train_loop.telemetry.timers import StepClock, Vitals

_limited = LimitedLog(logging.getLogger(__name__))
# By urgency: of several, the first is done.
_STOPS = [Stop(mode=mode, checkpoint=keep) for mode in ("cancel", "pause", "resize", "move") for keep in (True, False)]
_PAUSE, MOVE = Stop(mode="pause"), Stop(mode="move")
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Wishes:
    """What one rank has to say before a step."""

    stop: Stop | None = None
    """What the run was asked to do instead; rank 0's counts."""
    save: bool = False
    """By its clock a checkpoint is due."""
    look: bool = False
    """By its clock it is time to ask for pre-emptions."""
    trouble: bool = False
    """It has heard of what must end the run."""


@dataclass(frozen=True)
class Agreement:
    """The same on every rank."""

    divisor: float
    """What the step's loss is divided by: how many positions have something to predict, or the sum of their weights."""
    tokens: int
    """Tokens of the whole step, padding not counted."""
    stop: Stop | None
    """What to do instead of this step."""
    save: bool
    """A checkpoint follows this step, whatever its number."""
    look: bool
    """All ranks ask for pre-emptions after this step."""
    trouble: bool
    """Some rank has heard of what must end the run."""


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


class StopSign:
    """What the run was asked to do, as rank 0 sees it; on object storage, looked for every second beside the loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: Stop | None = None
        self._at_every_step = session.rank == 0 and not is_remote(session.run_dir.root)
        if session.rank == 0 and not self._at_every_step:
            threading.Thread(target=self._keep_looking, name="stop", daemon=True).start()

    @property
    def seen(self) -> Stop | None:
        """What to do instead of the next step, as far as this rank knows."""
        if self._at_every_step:
            self._look()
        return _PAUSE if self._session.told_to_end() else self._seen

    def _keep_looking(self) -> None:
        pause = threading.Event()
        while not pause.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        # It may come back; whoever asked will ask again, or end us.
        with storage_may_fail(partial(_limited.warning, "nobody can ask this run to stop: %s")):
            self._seen = self._session.run_dir.stop(attempt=self._session.attempt)


def agree(batch: StepBatch, clock: StepClock, mine: Wishes, mesh: Mesh) -> Agreement:
    """Hear every rank: its share of the step's tokens, and what it wishes. What one rank wishes, all do."""
    # Ulysses peers hold the same samples, and tokens count once.
    divisor = batch.divisor
    # A sum of weights makes float64 of all three words, which holds the other two exactly.
    counts = torch.stack([divisor, batch.lengths.sum().to(divisor.dtype)]) * (mesh.sequence_rank == 0)
    stops = [0] * len(_STOPS)
    if mine.stop is not None:
        stops[_STOPS.index(mine.stop.model_copy(update={"deadline": None, "attempt": None}))] = 1
    words = torch.cat([counts, counts.new_tensor([mine.save, mine.look, mine.trouble, *stops])])
    with clock.waiting():
        dist.all_reduce(words)
        whole, tokens, save, look, trouble, *asked = words.tolist()
    stop = next((stop for stop, times in zip(_STOPS, asked, strict=True) if times), None)
    return Agreement(whole, int(tokens), stop, bool(save), bool(look), bool(trouble))


def share_vitals(mine: Vitals, mesh: Mesh) -> list[Vitals]:
    """The state of every rank; a collective call."""
    told_WN = torch.zeros(mesh.plan.world, len(mine), dtype=torch.int64, device=mesh.device)
    told_WN[mesh.rank] = torch.tensor(mine)
    dist.all_reduce(told_WN)
    return [Vitals(*rank) for rank in told_WN.tolist()]
