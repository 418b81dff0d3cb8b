"""Plan of a data stream, and a plain reader for machines without Ray."""

from collections.abc import Iterator
from dataclasses import dataclass

from train_loop.data.dataset import Dataset, Rows
from train_loop.data.order import StepOrder
from train_loop.data.read import read_rows
from train_loop.plan import MeshPlan


@dataclass(frozen=True)
class StreamPlan:
    """The rows that a run still has to read: `steps` optimizer steps from the position `start`."""

    dataset: Dataset
    order: StepOrder
    start: int
    steps: int


def local_stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
    """Yield the same rows as Ray Data's stream; the first rank of every Ulysses group reads them itself."""
    leads = mesh.sequence_rank(rank) == 0
    for step in range(plan.steps):
        ids = plan.order.step(plan.start + step * plan.order.global_batch)
        yield read_rows(plan.dataset, ids[mesh.data_rank(rank)]) if leads else None
