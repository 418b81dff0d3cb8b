"""What a loop is told about where it runs; Ray Train and torchrun each give one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from train_loop.data.dataset import Rows
from train_loop.data.reader import StreamPlan
from train_loop.plan import MeshPlan
from train_loop.run_dir import RunDir

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
