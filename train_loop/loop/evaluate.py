"""Evaluation loss on held-out data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from train_loop.data.dataset import IGNORE, Dataset
from train_loop.data.order import Order, StepOrder
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.batch import MicroBatch, check_vocabulary, micro_batches, share_rows, total_weight
from train_loop.loop.loss import CROSS_ENTROPY, IN_ORDER, TokenLoss
from train_loop.parallel.mesh import Mesh


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation, identical on all ranks except for the seconds."""

    loss: float
    """Mean cross entropy per token over all samples, weighted if the data has weights.

    NaN if the samples have no labels.
    """
    perplexity: float
    tokens: int
    """Number of labels."""
    seconds: float


def evaluate(
    loss: TokenLoss,
    dataset: Dataset,
    mesh: Mesh,
    *,
    per_device: int,
    in_order: bool = False,
    stops: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Compute loss and perplexity over every sample exactly once, at most `per_device` at a time. A collective call.

    It leaves model and random generators unchanged. `in_order` sums in the order of batches, whatever the mesh. Returns
    None if `stops`, which is called before each batch and may be collective, returns True.
    """
    started, model = perf_counter(), loss.model
    # Both in float64: the sum over millions of tokens must not depend on the mesh.
    sums = _SumsInOrder(dataset, mesh, per_device) if in_order else _Sums(mesh)
    model.eval()
    stopped = False
    with torch.no_grad():
        for batch in _batches(loss, dataset, mesh, per_device):
            if stopped := stops():
                break
            sums.add(
                # Cross entropy only, without the extra terms of training.
                loss(batch, rule=IN_ORDER if in_order else CROSS_ENTROPY),
                total_weight(batch.labels, batch.weights),
                (batch.labels != IGNORE).sum(),
            )
    model.train()
    for module in model.modules():
        # Without a backward pass, units that are kept unsharded after forward would remain unsharded.
        if isinstance(module, FSDPModule):
            module.reshard()
    if stopped:
        return None
    total = sums.reduce()
    mean = total[0] / total[1]
    return Evaluation(mean.item(), mean.exp().item(), int(total[2]), perf_counter() - started)


class _Sums:
    """Sums of loss, its divisor and tokens over this rank's batches."""

    def __init__(self, mesh: Mesh) -> None:
        self._total = torch.zeros(3, dtype=torch.float64, device=mesh.device)

    def add(self, *values: Tensor) -> None:
        """Add a batch."""
        self._total += torch.stack([value.double() for value in values])

    def reduce(self) -> Tensor:
        """Return the sums over all ranks. Ulysses peers hold different slices of a sample: nothing counts twice."""
        dist.all_reduce(self._total)
        return self._total


class _SumsInOrder:
    """The same sums, from a table with a row for each batch and Ulysses rank. Zeros make its all-reduce exact."""

    def __init__(self, dataset: Dataset, mesh: Mesh, per_device: int) -> None:
        self._mesh, self._round = mesh, 0
        self._batches = -(-dataset.samples // per_device)
        rounds = -(-self._batches // mesh.plan.dp)
        self._table = torch.zeros(rounds * mesh.plan.dp, mesh.plan.sp, 3, dtype=torch.float64, device=mesh.device)

    def add(self, *values: Tensor) -> None:
        """Add a batch."""
        number = self._round * self._mesh.plan.dp + self._mesh.data_rank
        self._table[number, self._mesh.sequence_rank] = torch.stack([value.double() for value in values])
        self._round += 1

    def reduce(self) -> Tensor:
        """Return the sums over all ranks; batches that only fill the last round are zero."""
        dist.all_reduce(self._table)
        return self._table[: self._batches].sum((0, 1))


def _batches(loss: TokenLoss, dataset: Dataset, mesh: Mesh, per_device: int) -> Iterator[MicroBatch]:
    """Yield this rank's batches in sample order; rows without labels pad the last round."""
    order = Order(dataset.samples, seed=0, shuffle=False, dataset=dataset.fingerprint, end=dataset.samples)
    deal = StepOrder(order, mesh.plan.dp, per_device)
    for rows in local_stream(StreamPlan(dataset, deal, 0, deal.steps_left(0)), mesh.plan, mesh.rank):
        check_vocabulary(rows, loss.anatomy.vocabulary)
        batch = share_rows(rows, count=per_device, dataset=dataset, mesh=mesh)
        yield from micro_batches(batch, per_device, loss.model, mesh)
