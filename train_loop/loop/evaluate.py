"""The loss on data that is not trained on."""

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
    """The same on every rank, but for the seconds."""

    loss: float
    """Cross entropy per token over all samples, the weighted mean where the data has weights.

    Not a number where they hold nothing to predict.
    """
    perplexity: float
    tokens: int
    """Tokens that were predicted."""
    seconds: float


def evaluate(loss: TokenLoss, dataset: Dataset, mesh: Mesh, *, per_device: int) -> Evaluation:
    """Loss and perplexity over every sample exactly once, at most `per_device` at a time; a collective call.

    It leaves the model as it was between two steps, and draws from no generator.
    """
    started, model = perf_counter(), loss.model
    # In float64: the sum over millions of tokens must not depend on how the mesh has dealt them out.
    total = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # loss, what it is divided by, tokens
    model.eval()
    with torch.no_grad():
        for batch in _batches(loss, dataset, mesh, per_device):
            # Cross entropy alone, whatever training adds to it.
            total[0] += loss(batch, rule=CROSS_ENTROPY)
            total[1] += total_weight(batch.labels, batch.weights)
            total[2] += (batch.labels != IGNORE).sum()
    model.train()
    for module in model.modules():
        # Without a backward pass, units that stay whole after their forward would be whole still.
        if isinstance(module, FSDPModule):
            module.reshard()
    # Every rank has counted its own slice of its own samples, so that Ulysses peers count once.
    dist.all_reduce(total)
    mean = total[0] / total[1]
    return Evaluation(mean.item(), mean.exp().item(), int(total[2]), perf_counter() - started)


def _batches(loss: TokenLoss, dataset: Dataset, mesh: Mesh, per_device: int) -> Iterator[MicroBatch]:
    """The samples in order, dealt out to data ranks; rows without labels make up what they lack in the last round."""
    order = Order(dataset.samples, seed=0, shuffle=False, dataset=dataset.fingerprint, end=dataset.samples)
    deal = StepOrder(order, mesh.plan.dp, per_device)
    for rows in local_stream(StreamPlan(dataset, deal, 0, deal.steps_left(0)), mesh.plan, mesh.rank):
        check_vocabulary(rows, loss.model)
        batch = share_rows(rows, count=per_device, dataset=dataset, mesh=mesh)
        yield from micro_batches(batch, per_device, loss.model, mesh)
