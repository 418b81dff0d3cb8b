"""What a loop is told about where it runs; Ray Train and torchrun each give one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from train_loop.data.dataset import Rows
from train_loop.data.reader import StreamPlan
from train_loop.plan import MeshPlan
from train_loop.run_dir import RunDir, storage_seconds


class Preemption(NamedTuple):
    """Word that the hosts of some ranks will be taken away."""

    ranks: tuple[int, ...]
    deadline: float | None
    """Unix seconds; None where nobody said."""


PATIENCE = storage_seconds()
"""Seconds for which storage may fail before a start gives up."""
OpenStream = Callable[[StreamPlan, MeshPlan, int], Iterator[Rows | None]]


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
    told_to_end: Callable[[], bool] = lambda: False
    """Whether this process was asked by a signal to end."""
    expect_restart: Callable[[], None] = lambda: None
    """Told at every save on the way: there is something to go on from."""
    proves_pauses: bool = False
    """Whether the checkpoint that a pause leaves is read once more: who asked for it may take hosts and disks away."""
    preemption: Callable[[], Preemption | None] | None = None
    """Asks for the newest word of a pre-emption, the same on all ranks; a collective call. None: nobody would know."""

    @property
    def patience(self) -> float:
        """Seconds for which storage may fail: less than the others wait for this rank."""
        return min(PATIENCE, self.timeout.total_seconds() / 2)
