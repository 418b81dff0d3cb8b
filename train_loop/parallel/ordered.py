"""Gradients of an `any_size` run and their norm, whose bits do not depend on the mesh.

For gradients, an all-to-all and additions in the order of the run's reduction tree replace FSDP2's reductions.
EasyScale (Li et al., 2022) did so for DDP. Norms of pieces fill a table: a rank has its own entries and zeros
elsewhere, so that an all-reduce is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor

from train_loop.errors import UserError
from train_loop.parallel.mesh import Mesh
from train_loop.plan import ReductionTree


def order_units(model: nn.Module, tree: ReductionTree, mesh: Mesh) -> list["UnitSum"]:
    """Replace the reductions of a model's FSDP units by sums in the tree's order. Raises UserError."""
    merges = tree.merges(mesh.plan)
    replicas = mesh.fsdp.get_group("ddp") if mesh.plan.ddp > 1 else None
    units = list[UnitSum]()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            unit = UnitSum(merges, replicas)
            module.set_custom_reduce_scatter(OrderedReduceScatter())
            module.set_all_reduce_hook(unit)
            if replicas is not None:
                _sum_replicas_by_hook(module)
            units.append(unit)
    return units


class OrderedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter as an all-to-all, whose parts are summed in pairs of neighbouring ranks."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum `input_tensor` [ranks x n] over the group into `output_tensor` [n], this rank's part."""
        assert not async_op, "FSDP2 calls it without async_op"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(sum_pairs(received.view(group.size(), -1).unbind()))


class UnitSum:
    """The sum of one FSDP unit's gradients over the micro-batches of a step, called after each reduce-scatter."""

    def __init__(self, merges: Sequence[int], replicas: dist.ProcessGroup | None) -> None:
        self._merges, self._replicas = merges, replicas
        self._sums: list[Tensor] = []
        self._turn = 0

    def begin_step(self) -> None:
        """Forget partial sums."""
        self._sums.clear()
        self._turn = 0

    def __call__(self, reduced: Tensor) -> None:
        """Add to a micro-batch's gradients, in place, the partial sums that they complete."""
        for _ in range(self._merges[self._turn]):
            part = self._sums.pop()
            if part.is_cuda:
                # It was allocated on the stream of reduce-scatters.
                part.record_stream(torch.cuda.current_stream())
            reduced.add_(part)
        self._turn += 1
        if self._turn < len(self._merges):
            self._sums.append(reduced)
            return
        self._turn = 0
        if self._replicas is not None:
            parts = reduced.new_empty(self._replicas.size(), reduced.numel())
            dist.all_gather_into_tensor(parts.view(-1), reduced, group=self._replicas)
            reduced.copy_(sum_pairs(parts.unbind()))


def sum_pairs(parts: Sequence[Tensor]) -> Tensor:
    """Sum a power of two of tensors in pairs of neighbours; it overwrites them."""
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _sum_replicas_by_hook(unit: FSDPModule) -> None:
    """Make FSDP2 leave the sum over replicas to the unit's hook.

    It uses private names; the runs on 2 x 2 ranks in test_ordered.py fail if they change. Raises UserError for a
    version of torch without them.
    """
    groups = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", None)
    if groups is None:
        raise UserError(
            f"reproducible=any_size with several replicas is not supported by torch {torch.__version__}; install torch "
            "2.13, or shard over all workers (strategy.fsdp_size: 0)"
        )
    for group in groups:
        shape = group.mesh_info
        group.mesh_info = FSDPMeshInfo(shape.mesh, shard_mesh_dim=shape.shard_mesh_dim)


@dataclass(frozen=True)
class _Pieces:
    """The rows of one parameter on this rank, cut as in every allowed mesh."""

    parameter: nn.Parameter
    rows: tuple[tuple[int, int], ...]


class GradientNorm:
    """The norm of a model's gradients, from norms of pieces that exist at every allowed number of shards."""

    def __init__(self, model: nn.Module, tree: ReductionTree, mesh: Mesh) -> None:
        sizes = [mesh.plan.sp << power for power in range(tree.max_shards.bit_length())]
        self._group = mesh.fsdp.get_group("fsdp") if mesh.plan.fsdp > 1 else None
        rank = mesh.rank % mesh.plan.fsdp
        self._pieces: list[_Pieces] = []
        places: list[int] = []
        self._total = 0
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            count = parameter.shape[0]
            cuts = row_cuts(count, sizes)
            chunk = -(-count // mesh.plan.fsdp)
            first, last = min(rank * chunk, count), min((rank + 1) * chunk, count)
            own = [number for number, start in enumerate(cuts[:-1]) if first <= start < last]
            rows = tuple((cuts[number] - first, cuts[number + 1] - first) for number in own)
            self._pieces.append(_Pieces(parameter, rows))
            places += [self._total + number for number in own]
            self._total += len(cuts) - 1
        self._places = torch.tensor(places, dtype=torch.int64)

    def __call__(self) -> Tensor:
        """Return the norm, in float32, the same on all ranks. A collective call."""
        found: list[Tensor] = []
        device: torch.device | None = None
        for one in self._pieces:
            gradient = one.parameter.grad
            if gradient is None:
                found += [torch.zeros((), device=one.parameter.device)] * len(one.rows)
                continue
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            device = local.device
            if one.rows:
                found += torch._foreach_norm([local[start:end] for start, end in one.rows])
        device = device or self._pieces[0].parameter.device
        table = torch.zeros(self._total, dtype=torch.float64, device=device)
        if found:
            table[self._places.to(device)] = torch.stack(found).double()
        if self._group is not None:
            dist.all_reduce(table, group=self._group)
        return table.square().sum().sqrt().float()


def row_cuts(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the bounds of the pieces into which `count` rows are cut by every number of shards, ascending."""
    bounds = {min(part * -(-count // size), count) for size in sizes for part in range(size + 1)}
    return sorted(bounds)
