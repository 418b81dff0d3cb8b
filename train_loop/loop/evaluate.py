"""Evaluation of the objective on held-out data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train_loop.data.dataset import Dataset
from train_loop.data.masking import EVALUATION, mask_rows
from train_loop.data.order import Order, StepOrder
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.batch import MicroBatch, check_vocabulary, micro_batches, share_rows
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.reduction import Reduction
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.shard import begin_gather, end_gather
from train_loop.run_dir import Stop


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation, identical on all ranks except for the seconds."""

    metrics: dict[str, float | int]
    """The objective's results by name. Integers are counts."""
    seconds: float


def evaluate(
    objective: Objective,
    dataset: Dataset,
    reduction: Reduction,
    *,
    per_device: int,
    find_stop: Callable[[], Stop | None] = lambda: None,
) -> Evaluation | Stop:
    """Evaluate every sample exactly once, at most `per_device` at a time. A collective call.

    It leaves model and random generators unchanged. Returns the stop request that has interrupted it if `find_stop`
    returns one; it is called before each batch and may be collective.
    """
    started, stop, mesh = perf_counter(), None, reduction.mesh

    def rounds() -> Iterator[Tensor]:
        nonlocal stop
        for batch in _batches(objective, dataset, mesh, per_device):
            if stop := find_stop():
                end_gather(objective.anatomy)
                return
            # In float64: the sum over millions of tokens must not depend on the mesh.
            yield torch.stack([value.double() for value in objective.evaluate(batch)])

    names, batches = objective.evaluation_sums, -(-dataset.samples // per_device)
    with torch.no_grad(), _evaluating(objective.anatomy.model):
        total = reduction.sum_evaluation(rounds(), names=len(names), batches=batches)
    if stop is not None:
        return stop
    return Evaluation(objective.metrics(dict(zip(names, total, strict=True))), perf_counter() - started)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation within the context."""
    model.eval()
    yield
    model.train()
    for module in model.modules():
        # Without a backward pass, units that are kept unsharded after forward would remain unsharded.
        if isinstance(module, FSDPModule):
            module.reshard()


def _batches(objective: Objective, dataset: Dataset, mesh: Mesh, per_device: int) -> Iterator[MicroBatch]:
    """Yield this rank's batches in sample order; rows without labels pad the last round."""
    order = Order(dataset.samples, seed=0, shuffle=False, dataset=dataset.fingerprint, end=dataset.samples)
    order_of_ranks = StepOrder(order, mesh.plan.dp, per_device)
    rounds = order_of_ranks.steps_left(0)
    for rows in local_stream(StreamPlan(dataset, order_of_ranks, 0, rounds), mesh.plan, mesh.rank):
        # The parameters that forward needs first are gathered while the masks of the batch are built.
        begin_gather(objective.anatomy)
        check_vocabulary(rows, objective.anatomy.vocabulary)
        rows = mask_rows(rows, dataset, EVALUATION)
        batch = share_rows(rows, count=per_device, dataset=dataset, mesh=mesh)
        yield from micro_batches(batch, per_device, objective.anatomy, mesh)
