"""Environment of the training loop on one rank, under Ray Train or torchrun."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple

from train_loop.checkpoint.access import RunAccess
from train_loop.data.dataset import Rows
from train_loop.data.stream.local import StreamPlan
from train_loop.liveness.heartbeat import Phase
from train_loop.plan import MeshPlan, RankMemory
from train_loop.run_dir import Fence, RunDir, storage_seconds
from train_loop.spec import JobSpec
from train_loop.telemetry.event_log import EventLog, group_journal


class Preemption(NamedTuple):
    """A notice that the hosts of some ranks will be preempted."""

    ranks: tuple[int, ...]
    deadline: float | None
    """Unix seconds; None if unknown."""


PATIENCE = storage_seconds()
"""Seconds for which a start retries failed storage."""
OpenStream = Callable[[StreamPlan, MeshPlan, int], Iterator[Rows | None]]


def ignore_mark(_step: int, _phase: Phase) -> None:
    """Do nothing: there are no heartbeats."""


@dataclass(frozen=True)
class Session:
    """Settings and callbacks of one rank. Its process group already exists."""

    rank: int
    world: int
    local_rank: int
    attempt: int
    run_dir: RunDir
    open_stream: OpenStream
    timeout: timedelta = timedelta(minutes=30)
    """Timeout of collectives."""
    epoch: int = 0
    """Fencing epoch of the worker group within the attempt; 0 without a fence."""
    stop_requested: Callable[[], bool] = lambda: False
    """Returns whether this process has received a signal to stop."""
    expect_restart: Callable[[], None] = lambda: None
    """Called after each intermediate checkpoint has started: the run can then be resumed."""
    proves_pauses: bool = False
    """True to verify the checkpoint of a pause: the user may remove hosts and disks afterwards."""
    preemption: Callable[[], Preemption | None] | None = None
    """Returns the newest preemption notice, identical on all ranks; a collective call. None if there is no source."""

    may_move: Callable[[], bool] | None = None
    """Returns whether remaining hosts have room for all ranks; None if the group cannot start elsewhere."""
    mark: Callable[[int, Phase], None] = ignore_mark
    """Sets the step and phase of this rank's heartbeats."""
    rank_memory: Callable[[JobSpec, int], RankMemory] | None = None
    """Returns the memory of this rank, on whose host so many ranks run; None: as measured."""
    end_event: str = "training_ended"
    """Event that reports how the ranks' work has ended."""

    @property
    def token(self) -> Fence:
        """Return the fencing token of this rank's worker group."""
        return Fence(self.attempt, self.epoch)

    @cached_property
    def journal(self) -> EventLog:
        """Return the only event log of this rank.

        While storage is unavailable, lines wait in its queue. A second log would overtake them, or lose its own.
        """
        return group_journal(self.run_dir, self.token, rank=self.rank)

    @property
    def access(self) -> RunAccess:
        """Return this rank's access to the run directory."""
        return RunAccess(self.run_dir, self.token, self.journal, self.patience)

    @property
    def patience(self) -> float:
        """Return the seconds for which storage is retried: less than the timeout of the other ranks' collectives."""
        return min(PATIENCE, self.timeout.total_seconds() / 2)
