"""Coordination of ranks before each step: stop requests, checkpoints, preemption checks and statistics."""

import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train_loop.loop.batch import StepBatch
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.reduction import Reduction
from train_loop.loop.session import Session
from train_loop.parallel.mesh import Mesh
from train_loop.plan import MeshPlan, Role, groups_across_hosts, list_ranks
from train_loop.run_dir import Stop, is_remote, storage_may_fail
from train_loop.system.limited_log import LimitedLog
from train_loop.telemetry.event_log import EventLog
from train_loop.telemetry.timers import RankStats, StepTimer

_limited = LimitedLog(logging.getLogger(__name__))
# By urgency: the first requested one applies.
_STOPS = [Stop(mode=mode, checkpoint=keep) for mode in ("cancel", "pause", "resize", "move") for keep in (True, False)]
_PAUSE, MOVE = Stop(mode="pause"), Stop(mode="move")
_POLL_SECONDS = 1.0
_NAMED_HOSTS = 8
"""Hosts of a group that a warning names."""


@dataclass(frozen=True)
class RankRequests:
    """Requests of one rank before a step."""

    stop: Stop | None = None
    """Request to stop before this step."""
    save: bool = False
    """A checkpoint is due by this rank's clock."""
    check_preemption: bool = False
    """A preemption check is due by this rank's clock."""
    fatal: bool = False
    """This rank has a fatal error, which must end the run."""


@dataclass(frozen=True)
class Agreement:
    """Decisions before a step, identical on all ranks."""

    divisor: float | None
    """Divisor of the step's loss, for example its number of labels; None if only the loss counts."""
    tokens: int
    """Tokens of the whole step, without padding."""
    stop: Stop | None
    """Request to stop before this step; None to train it."""
    save: bool
    """Save a checkpoint after this step, in addition to the schedule."""
    check_preemption: bool
    """Check for preemptions after this step, on all ranks."""
    fatal: bool
    """At least one rank has a fatal error."""


def gather_workers() -> list[dict[str, Any]]:
    """Return rank, host and pid of every rank, for debugging. A collective call."""
    workers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(workers, {"rank": dist.get_rank(), "host": socket.gethostname(), "pid": os.getpid()})
    return workers


def warn_of_hosts(mesh: MeshPlan, workers: list[dict[str, Any]], journal: EventLog) -> None:
    """Warn about groups that exchange in each layer and span several hosts, because that crosses the network."""
    peers = f"ulysses_size={mesh.sp}" if mesh.tp == 1 else f"tp_size x ulysses_size={mesh.peers}"
    each = "give each host a multiple of"
    kinds: tuple[tuple[Role, str, str, str], ...] = (
        ("sequence", "Ulysses groups", "all-to-all is", f"{each} {peers} workers, or choose a smaller ulysses_size"),
        (
            "tensor",
            "tensor parallel groups",
            "all-reduce is",
            f"{each} tp_size={mesh.tp} workers, or choose a smaller tp_size",
        ),
        (
            "expert",
            "expert parallel groups",
            "all-to-all is",
            f"{each} ep_size={mesh.ep} workers, or choose a smaller ep_size",
        ),
        (
            "shard",
            "FSDP groups",
            "gathers of each layer are",
            "fsdp_size: node shards inside hosts, if a worker has memory for larger shards",
        ),
    )
    for role, groups, exchange, remedy in kinds:
        found = groups_across_hosts(mesh, [worker["host"] for worker in workers], role)
        named = "; ".join(f"{list_ranks(group)} on {_list_hosts(hosts)}" for group, hosts in found.items())
        if found:
            journal.warn(f"{groups} span several hosts, where their {exchange} slow: {named}; {remedy}")


def _list_hosts(hosts: Sequence[str]) -> str:
    more = len(hosts) - _NAMED_HOSTS
    return ", ".join(hosts[:_NAMED_HOSTS]) + (f" and {more} more" if more > 0 else "")


class StopSignal:
    """Stop requests in the run directory, read by rank 0; on object storage a thread polls them every second."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: Stop | None = None
        self._at_every_step = session.rank == 0 and not is_remote(session.run_dir.root)
        if session.rank == 0 and not self._at_every_step:
            threading.Thread(target=self._keep_polling, name="stop", daemon=True).start()

    @property
    def seen(self) -> Stop | None:
        """Return the stop request that this rank knows, or a pause after a signal."""
        if self._at_every_step:
            self._poll()
        return _PAUSE if self._session.stop_requested() else self._seen

    def _keep_polling(self) -> None:
        pause = threading.Event()
        while not pause.wait(_POLL_SECONDS):
            self._poll()

    def _poll(self) -> None:
        # Storage may come back. The service repeats its request, or kills the process.
        with storage_may_fail(partial(_limited.warning, "stop requests cannot be read: %s")):
            self._seen = self._session.run_dir.stop(attempt=self._session.attempt)


def agree(
    batch: StepBatch, requests: RankRequests, *, objective: Objective, reduction: Reduction, clock: StepTimer
) -> Agreement:
    """Combine the requests and counts of all ranks: one rank's request applies to all. A collective call."""
    shares = _divisor_shares(objective, batch, reduction.parts)
    share = batch.samples.new_zeros(()) if shares is None else shares.sum()
    # Peers hold the same samples; count their tokens once. A sum of weights makes the whole tensor float64,
    # which represents all counts exactly.
    counts = torch.stack([share, batch.tokens.to(share.dtype)]) * reduction.mesh.leads
    own = [requests.save, requests.check_preemption, requests.fatal, *_votes(requests.stop)]
    words = torch.cat([counts, counts.new_tensor(own)])
    with clock.waiting():
        dist.all_reduce(words)
        plain, tokens, save, check_preemption, fatal, *stop_counts = words.tolist()
        divisor = None if shares is None else reduction.sum_shares(shares, plain)
    return Agreement(divisor, int(tokens), _most_urgent(stop_counts), bool(save), bool(check_preemption), bool(fatal))


def agree_on_stop(stop: Stop | None) -> Stop | None:
    """Return the most urgent stop request of all ranks. A collective call on the CPU, which waits for no GPU."""
    votes = torch.tensor(_votes(stop))
    dist.all_reduce(votes)
    return _most_urgent(votes.tolist())


def agree_to_go_on(*, busy: bool, stop: Stop | None) -> tuple[bool, Stop | None]:
    """Return whether any rank is busy, and the most urgent stop request of all. A collective call on the CPU."""
    votes = torch.tensor([int(busy), *_votes(stop)])
    dist.all_reduce(votes)
    count, *stops = votes.tolist()
    return bool(count), _most_urgent(stops)


def _divisor_shares(objective: Objective, batch: StepBatch, parts: int) -> Tensor | None:
    """Return the divisor's share of each of `parts` equal parts of a batch, in int64 or float64."""
    rows = len(batch.samples) // parts
    shares = [objective.divisor(batch.part(slice(rows * part, rows * (part + 1)))) for part in range(parts)]
    known = [share for share in shares if share is not None]
    if len(known) < parts:
        return None
    found = torch.stack(known)
    return found.double() if found.is_floating_point() else found.long()


def _votes(stop: Stop | None) -> list[int]:
    """Return one number for each kind of stop request: 1 for this one, 0 for the others."""
    kind = None if stop is None else Stop(mode=stop.mode, checkpoint=stop.checkpoint)
    return [int(kind == one) for one in _STOPS]


def _most_urgent(votes: list[float]) -> Stop | None:
    return next((stop for stop, count in zip(_STOPS, votes, strict=True) if count), None)


def gather_stats(own: RankStats, mesh: Mesh) -> list[RankStats]:
    """Gather the statistics of all ranks. A collective call."""
    stats_WN = torch.zeros(mesh.plan.world, len(own), dtype=torch.int64, device=mesh.device)
    stats_WN[mesh.rank] = torch.tensor(own)
    dist.all_reduce(stats_WN)
    return [RankStats(*rank) for rank in stats_WN.tolist()]
