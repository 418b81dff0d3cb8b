"""Measurements of a step on existing ranks: its loss and gradients, its bytes, and its dependence on rows and seeds."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor

from train_loop.data.dataset import Dataset, Rows
from train_loop.data.order import PADDING
from train_loop.data.stream.local import read_rows
from train_loop.loop.batch import MicroBatch, StepBatch, share_rows
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.reduction import PlainReduction
from train_loop.loop.step import accumulate, train_step
from train_loop.model.parts import is_split, own_parts
from train_loop.parallel.mesh import Mesh
from train_loop.state import TrainState

Gradients = dict[str, Tensor | None]


class Step(NamedTuple):
    """Results of an accumulated step over all ranks."""

    loss: float
    gradients: Gradients


def accumulate_plainly(
    objective: Objective, batches: Iterable[MicroBatch], divisor: float | None, mesh: Mesh, *, once: bool = False
) -> Tensor:
    """Accumulate a step's gradients in the order of the libraries; return its loss.

    With `once`, ranks exchange gradients only after the last micro-batch.
    """
    reduction = PlainReduction(objective.anatomy.model, mesh, once=once)
    scaler = GradScaler(mesh.device.type, enabled=False)
    return accumulate(objective, batches, divisor, reduction=reduction, scaler=scaler).loss


def whole(gradient: Tensor | None) -> Tensor:
    """Return a gradient, gathered from its shards."""
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    return joined(gradient) if is_split(gradient) else gradient.full_tensor()


def joined(tensor: DTensor) -> Tensor:
    """Return a whole tensor from the parts of all ranks, the mean of replicas. A collective call."""
    total, holders = (torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(2))
    for own, box in own_parts(tensor):
        total[box], holders[box] = own, 1
    for one in (total, holders):
        dist.all_reduce(one)
    return total / holders


def take_gradients(model: nn.Module) -> Gradients:
    """Return the whole gradients of a model, and remove them from it. A collective call."""
    found = {name: None if p.grad is None else whole(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def largest_difference(found: Gradients, expected: Gradients) -> float:
    """Return the largest relative difference of gradients; NaN if one is not finite.

    A difference is relative to the gradient, or to a hundredth of the norm of all if that is larger.
    """
    known = [gradient for gradient in expected.values() if gradient is not None]
    least = torch.stack([gradient.norm() for gradient in known]).norm() / 100
    errors = []
    for name, gradient in found.items():
        reference = expected[name] if expected[name] is not None else torch.zeros(())
        assert reference is not None
        value = torch.zeros_like(reference) if gradient is None else gradient
        errors.append((value - reference).norm() / torch.maximum(reference.norm(), least))
    return float(torch.stack(errors).max())


def worst_gradient(found: Gradients, expected: Gradients) -> str:
    """Return the name of the parameter whose gradient differs most."""
    return max(found, key=lambda name: largest_difference({name: found[name]}, expected))


def step_difference(found: Step, expected: Step) -> float:
    """Return the largest relative difference of the losses and gradients of two steps."""
    loss = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-12)
    return max(loss, largest_difference(found.gradients, expected.gradients))


def rows_of_rank(dataset: Dataset, mesh: Mesh, *, real: int, count: int) -> StepBatch:
    """Return this rank's part of a step of `count` rows, of which the first `real` are samples and the rest padding.

    A collective call over the ranks that share a sequence.
    """
    samples = np.where(np.arange(count) < real, np.arange(count), PADDING)
    mine = np.array_split(samples, mesh.plan.dp)[mesh.data_rank]
    rows: Rows | None = read_rows(dataset, mine) if mesh.leads else None
    return share_rows(rows, count=len(mine), dataset=dataset, mesh=mesh)


class Memory(NamedTuple):
    """Bytes of this rank in a step, by kind, and at the step's peak."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    used: float
    """Share of the trained parameters that get gradients."""


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """A tracker of modules with frozen parameters, which have no gradients to watch: those count all the same."""

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        watched = install_grad_hooks and all(one.requires_grad for one in module.parameters())
        return super()._track_module_params_and_buffers(module, watched)


def measure_memory(
    state: TrainState,
    objective: Objective,
    batches: Callable[[], Iterable[MicroBatch]],
    divisor: float | None,
    mesh: Mesh,
) -> Memory:
    """Return the bytes of a second step on the existing ranks; `batches` returns its micro-batches."""
    reduction, seen, reached, tracker = PlainReduction(state.model, mesh), list[int](), set[int](), _Tracker()

    def watched() -> Iterator[MicroBatch]:
        for one in batches():
            tracker.reset_mod_stats()
            yield one
        seen.append(_bytes(one.grad for one in state.model.parameters()))
        reached.update(id(one) for one in state.model.parameters() if one.grad is not None)

    def step() -> None:
        train_step(state, objective, watched(), divisor=divisor, reduction=reduction, max_grad_norm=None)

    step()
    tracker.track_external(state.model, *state.optimizers)
    with tracker:
        step()
    moments = (one for optimizer in state.optimizers for moment in optimizer.state.values() for one in moment.values())
    peak = max(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
    parameters = list(state.model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    used = sum(one.numel() for one in trained if id(one) in reached) / sum(one.numel() for one in trained)
    return Memory(_bytes(parameters), seen[-1], _bytes(moments), peak, used)


def _bytes(tensors: Any) -> int:
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors if isinstance(one, Tensor))
    return sum(one.nbytes for one in local if one.ndim)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluate a model within the context, with gradients."""
    model.eval()
    try:
        yield
    finally:
        model.train()
