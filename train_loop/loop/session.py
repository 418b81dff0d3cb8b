"""What a loop is told about where it runs; Ray Train and torchrun each give one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from train_loop.data.dataset import Rows
from train_loop.data.stream.local import StreamPlan
from train_loop.liveness.heartbeat import Phase
from train_loop.plan import MeshPlan
from train_loop.run_dir import Fence, RunDir, storage_seconds


class Preemption(NamedTuple):
    """Word that the hosts of some ranks will be taken away."""

    ranks: tuple[int, ...]
    deadline: float | None
    """Unix seconds; None where nobody said."""


PATIENCE = storage_seconds()
"""Seconds for which storage may fail before a start gives up."""
OpenStream = Callable[[StreamPlan, MeshPlan, int], Iterator[Rows | None]]


def ignore_mark(_step: int, _phase: Phase) -> None:
    """Do nothing: nobody listens for heartbeats."""


@dataclass(frozen=True)
class Session:
    """One rank's place in a run. The process group is already there."""

    rank: int
    world: int
    local_rank: int
    attempt: int
    run_dir: RunDir
    open_stream: OpenStream
    timeout: timedelta = timedelta(minutes=30)
    """How long a collective may wait."""
    epoch: int = 0
    """The worker group's fencing epoch within the attempt; 0 if nobody raised one for it."""
    told_to_end: Callable[[], bool] = lambda: False
    """Whether this process was asked by a signal to end."""
    expect_restart: Callable[[], None] = lambda: None
    """Told at every save on the way: there is something to go on from."""
    proves_pauses: bool = False
    """Whether the checkpoint that a pause leaves is read once more: who asked for it may take hosts and disks away."""
    preemption: Callable[[], Preemption | None] | None = None
    """Asks for the newest word of a pre-emption, the same on all ranks; a collective call. None: nobody would know."""

    may_move: Callable[[], bool] | None = None
    """Returns whether hosts that will stay have room for all ranks; None if the group cannot be started elsewhere."""
    mark: Callable[[int, Phase], None] = ignore_mark
    """Notes where this rank is, for whoever watches the group: a step, and what the rank does in it."""

    @property
    def token(self) -> Fence:
        """The fencing token of this rank's worker group."""
        return Fence(self.attempt, self.epoch)

    @property
    def patience(self) -> float:
        """Seconds for which storage may fail: less than the others wait for this rank."""
        return min(PATIENCE, self.timeout.total_seconds() / 2)
