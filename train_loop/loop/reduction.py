"""Sums over the micro-batches and ranks of a run: in the order of the libraries, or in that of a reduction tree."""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train_loop.parallel.mesh import Mesh
from train_loop.parallel.norm import norm_by_parts
from train_loop.parallel.ordered import GradientNorm, UnitSum, order_units
from train_loop.parallel.unit_calls import UnitCalls
from train_loop.plan import ReductionTree, shards_of
from train_loop.state import seed_generators


class Reduction(Protocol):
    """The order of all sums of a run. Its sums are collective calls with equal results on all ranks."""

    mesh: Mesh
    parts: int
    """Parts of a rank's step batch whose shares of the divisor are counted apart."""

    def begin_step(self, step: int) -> None:
        """Prepare for the micro-batches of the step after `step` steps."""
        ...

    def begin_micro_batch(self, number: int) -> None:
        """Prepare for a forward pass; numbers count from 0 in each step."""
        ...

    def backward(self, loss: Tensor, *, last: bool, stands_in: bool = False) -> None:
        """Add the gradients of a micro-batch to those of the step; `stands_in` is that of its terms."""
        ...

    def grad_norm(self) -> Tensor:
        """Return the norm of all gradients."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Sum one value per micro-batch of this rank, [K]."""
        ...

    def sum_shares(self, shares: Tensor, plain: float) -> float:
        """Sum one share per part, [parts]. `plain` is their sum in any order, which is exact for integers."""
        ...

    def sum_evaluation(self, rounds: Iterable[Tensor], *, names: int, batches: int) -> Tensor:
        """Sum one float64 tensor [names] per round of batches; only the first `batches` of them are not padding."""
        ...


class PlainReduction:
    """The sums of FSDP2 and of all-reduce. Their bits depend on the number of ranks.

    With `once`, ranks keep whole gradients until the last micro-batch of a step, and exchange them only then.
    """

    parts = 1

    def __init__(self, model: nn.Module, mesh: Mesh, calls: UnitCalls | None = None, *, once: bool = False) -> None:
        assert isinstance(model, FSDPModule), "parallelize makes every model an FSDP unit"
        self._model, self.mesh, self._calls, self._once = model, mesh, calls, once
        self._is_last: bool | None = None
        """The value of `last` by which units exchange now."""
        # A walk through the modules of a model with adapters takes milliseconds.
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def begin_step(self, step: int) -> None:
        """Forget calls of units in a step that did not end."""
        if self._calls is not None:
            self._calls.begin_step()

    def begin_micro_batch(self, number: int) -> None:
        """Do nothing."""

    def backward(self, loss: Tensor, *, last: bool, stands_in: bool = False) -> None:
        """Reduce gradients to shards, because whole ones may not fit; replicas of a shard all-reduce once a step."""
        if last != self._is_last:
            if self._once:
                self._model.set_requires_gradient_sync(last)
            else:
                self._model.set_requires_all_reduce(last)
            self._is_last = last
        if self._calls is not None:
            self._calls.end_forward()
        torch.autograd.backward(loss)
        if self._calls is not None:
            self._calls.end_micro_batch(stands_in=stands_in)
            if last:
                self._calls.agree()

    def grad_norm(self) -> Tensor:
        """Return the norm of all gradients."""
        if any(mesh is not None for mesh in (self.mesh.tp, self.mesh.experts, self.mesh.wholes)):
            return norm_by_parts(self._model, self.mesh.device)
        norm = nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def sum(self, values: Tensor) -> Tensor:
        """Sum one value per micro-batch of this rank, in at least float32, whatever the model's output_dtype is."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        total: Tensor = sum(values.unbind(), start=torch.zeros((), dtype=dtype, device=values.device))
        return sum_once(total, self.mesh)

    def sum_shares(self, shares: Tensor, plain: float) -> float:
        """Return the plain sum."""
        return plain

    def sum_evaluation(self, rounds: Iterable[Tensor], *, names: int, batches: int) -> Tensor:
        """Sum all rounds. Ulysses peers hold different slices of a sample: nothing counts twice."""
        total = torch.zeros(names, dtype=torch.float64, device=self.mesh.device)
        for values in rounds:
            total += values
        if self._calls is not None:
            self._calls.agree()
        return sum_once(total, self.mesh)


def sum_once(values: Tensor, mesh: Mesh) -> Tensor:
    """Sum values over all ranks; ranks that split layers have equal values, which count once."""
    if mesh.plan.tensor_rank(mesh.rank):
        values = torch.zeros_like(values)
    dist.all_reduce(values)
    return values


class OrderedReduction:
    """The sums of an `any_size` run in the order of its reduction tree: their bits do not depend on the mesh.

    Gradients are summed by `train_loop/parallel/ordered.py`. Other sums fill a table: a rank has its own entries and
    zeros elsewhere, so that an all-reduce is exact.
    """

    def __init__(
        self, model: nn.Module, tree: ReductionTree, mesh: Mesh, *, seed: int, calls: UnitCalls | None = None
    ) -> None:
        self._model, self._tree, self.mesh, self._seed, self._calls = model, tree, mesh, seed, calls
        shards = shards_of(mesh.plan)
        self._shards = shards
        self._replica, self._shard = divmod(mesh.data_rank, shards)
        self.parts = tree.leaves // (shards * mesh.plan.ddp)
        self._units: list[UnitSum] = order_units(model, tree, mesh)
        self._norm: GradientNorm | None = None
        self._step = 0

    def begin_step(self, step: int) -> None:
        """Forget partial sums of a step that did not end."""
        self._step = step
        if self._calls is not None:
            self._calls.begin_step()
        for unit in self._units:
            unit.begin_step()

    def begin_micro_batch(self, number: int) -> None:
        """Seed dropout by the place of the micro-batch, and not by the rank that computes it."""
        seed_generators(self._seed, step=self._step, rank=self._slice_of(number))

    def backward(self, loss: Tensor, *, last: bool, stands_in: bool = False) -> None:
        """Add gradients to the partial sums of each unit; FSDP2 would add them in another order."""
        if self._calls is not None:
            self._calls.end_forward()
        torch.autograd.backward(loss)
        if self._calls is not None:
            self._calls.end_micro_batch(stands_in=stands_in)
        if not last:
            for parameter in self._model.parameters():
                parameter.grad = None
        elif self._calls is not None:
            self._calls.agree()

    def grad_norm(self) -> Tensor:
        """Return the norm of all gradients, in float32."""
        if self._norm is None:
            self._norm = GradientNorm(self._model, self._tree, self.mesh)
        return self._norm()

    def sum(self, values: Tensor) -> Tensor:
        """Sum one value per micro-batch of this rank, in float64."""
        places = [self._slice_of(number) for number in range(len(values))]
        return _sum_table(values, places, size=self._tree.leaves * self.mesh.plan.sp)

    def sum_shares(self, shares: Tensor, plain: float) -> float:
        """Sum weights, which are the same on all ranks of a Ulysses group, in float64. Sums of counts are exact."""
        if not shares.is_floating_point():
            return plain
        own = shares if self.mesh.sequence_rank == 0 else shares[:0]
        places = [self._leaf(number) for number in range(len(own))]
        return float(_sum_table(own, places, size=self._tree.leaves))

    def sum_evaluation(self, rounds: Iterable[Tensor], *, names: int, batches: int) -> Tensor:
        """Sum a table with a row for each batch and Ulysses rank, without those that only fill the last round."""
        plan = self.mesh.plan
        shape = -(-batches // plan.dp) * plan.dp, plan.sp, names
        table = torch.zeros(shape, dtype=torch.float64, device=self.mesh.device)
        for number, values in enumerate(rounds):
            table[number * plan.dp + self.mesh.data_rank, self.mesh.sequence_rank] = values
        if self._calls is not None:
            self._calls.agree()
        dist.all_reduce(table)
        return table[:batches].sum((0, 1))

    def _leaf(self, number: int) -> int:
        """Return the place in the step of a micro-batch of this rank; both count from 0."""
        return (self._replica * self.parts + number) * self._shards + self._shard

    def _slice_of(self, number: int) -> int:
        """Return the place in the step of this rank's slice of a micro-batch; places count Ulysses peers, too."""
        return self._leaf(number) * self.mesh.plan.sp + self.mesh.sequence_rank


def _sum_table(values: Tensor, places: list[int], *, size: int) -> Tensor:
    """Sum values that are at these places of a table over all ranks, in the table's order."""
    table = torch.zeros(size, dtype=torch.float64, device=values.device)
    table[torch.tensor(places, dtype=torch.int64, device=values.device)] = values.double()
    dist.all_reduce(table)
    return table.sum()


def build_reduction(
    model: nn.Module, tree: ReductionTree | None, mesh: Mesh, *, seed: int, own: bool = False, once: bool = False
) -> Reduction:
    """Return the sums of a sharded model's run, in the order of the plan's reduction tree if it has one.

    `own` is for users' modules, which may call and use different parts of themselves on each rank. With `once`,
    gradients are reduced once a step.
    """
    calls = UnitCalls(model, mesh, once=tree is not None) if own else None
    if tree is None:
        return PlainReduction(model, mesh, calls, once=once)
    return OrderedReduction(model, tree, mesh, seed=seed, calls=calls)
