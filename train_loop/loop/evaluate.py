"""Evaluation loss on held-out data."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from train_loop.data.dataset import IGNORE, Dataset
from train_loop.data.order import Order, StepOrder
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.batch import MicroBatch, check_vocabulary, micro_batches, share_rows, total_weight
from train_loop.loop.loss import CROSS_ENTROPY, TokenLoss
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


def evaluate(loss: TokenLoss, dataset: Dataset, mesh: Mesh, *, per_device: int) -> Evaluation:
    """Compute loss and perplexity over every sample exactly once, at most `per_device` at a time. A collective call.

    It leaves model and random generators unchanged.
    """
    started, model = perf_counter(), loss.model
    # In float64: the sum over millions of tokens must not depend on the mesh.
    total = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # loss, its divisor, tokens
    model.eval()
    with torch.no_grad():
        for batch in _batches(loss, dataset, mesh, per_device):
            # Cross entropy only, without the extra terms of training.
            total[0] += loss(batch, rule=CROSS_ENTROPY)
            total[1] += total_weight(batch.labels, batch.weights)
            total[2] += (batch.labels != IGNORE).sum()
    model.train()
    for module in model.modules():
        # Without a backward pass, units that are kept unsharded after forward would remain unsharded.
        if isinstance(module, FSDPModule):
            module.reshard()
    # Ulysses peers hold different slices of a sample: nothing counts twice.
    dist.all_reduce(total)
    mean = total[0] / total[1]
    return Evaluation(mean.item(), mean.exp().item(), int(total[2]), perf_counter() - started)


def _batches(loss: TokenLoss, dataset: Dataset, mesh: Mesh, per_device: int) -> Iterator[MicroBatch]:
    """Yield this rank's batches in sample order; rows without labels pad the last round."""
    order = Order(dataset.samples, seed=0, shuffle=False, dataset=dataset.fingerprint, end=dataset.samples)
    deal = StepOrder(order, mesh.plan.dp, per_device)
    for rows in local_stream(StreamPlan(dataset, deal, 0, deal.steps_left(0)), mesh.plan, mesh.rank):
        check_vocabulary(rows, loss.model)
        batch = share_rows(rows, count=per_device, dataset=dataset, mesh=mesh)
        yield from micro_batches(batch, per_device, loss.model, mesh)
