"""Muon for sharded matrices, and for experts, whose tensors hold a matrix of each.

Jordan et al., "Muon" (2024), and Liu et al., "Muon is Scalable for LLM Training" (2025). Shapes: M rows and N columns
of a matrix, K matrices of one shape, W ranks that share them, E experts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)
from torch.optim.optimizer import ParamsT

from train_loop.model.families.anatomy import Fused
from train_loop.optim.by_mesh import local_of


class Muon(Optimizer):
    """torch's Muon for sharded matrices, bit-equal to torch's own on whole ones.

    torch's step fails on a matrix with fewer rows than ranks, and otherwise sums each product over ranks in bf16. This
    class takes matrices of one shape in batches of one per rank. An all-to-all gives each rank a whole matrix, and a
    second one returns the shards of all updates.

    Tensors of experts [E, M, N], which torch's Muon does not accept, are sharded by expert: a rank has whole matrices.
    `fused` has those of a gate and another projection, which are two matrices of each expert.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        adjust_lr_fn: str | None = None,
        fused: Mapping[int, Fused] | None = None,
    ) -> None:
        rule = {"nesterov": True, "ns_coefficients": (DEFAULT_A, DEFAULT_B, DEFAULT_C), "eps": EPS}
        rule |= {"ns_steps": DEFAULT_NS_STEPS, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum} | rule)
        self._fused = fused or {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one step to every parameter that has a gradient; a collective call."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for batch in _batches([p for p in trained if p.ndim == 2]):
                self._step(batch, group)
            for experts in (p for p in trained if p.ndim > 2):
                self._step_experts(experts, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        directions = torch.stack([self._direction(p, group) for p in parameters])  # [K, M/W, N]
        updates = _orthogonal(directions, parameters[0], group)
        for parameter, update in zip(parameters, updates, strict=True):
            local = local_of(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            _apply(update, local, _rate(group, parameter.shape))

    def _step_experts(self, parameter: Tensor, group: dict[str, Any]) -> None:
        direction, local = self._direction(parameter, group), local_of(parameter)  # [E/W, M, N]
        if isinstance(parameter, DTensor):
            # Offloaded ones are computed where the model is.
            direction = direction.to(parameter.device_mesh.device_type)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        fused = self._fused.get(id(parameter))
        parts = ((direction, local),) if fused is None else zip(fused.split(direction), fused.split(local), strict=True)
        for matrices, weights in parts:
            _apply(_newton_schulz_at_once(matrices, group), weights, _rate(group, weights.shape[1:]))

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the smoothed gradient's shard [M/W, N] in bf16, the dtype of the Newton-Schulz iterations."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, smoothed = local_of(parameter.grad), local_of(state["momentum_buffer"])
        smoothed.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(smoothed, group["momentum"]) if group["nesterov"] else smoothed).bfloat16()


def _rate(group: dict[str, Any], shape: torch.Size) -> float:
    rate: float = _adjust_lr(group["lr"], group["adjust_lr_fn"], shape)
    return rate


def _apply(update: Tensor, weights: Tensor, rate: float) -> None:
    # Offloaded parameters are on the CPU, and DTensors communicate on the mesh's device.
    weights.add_(update.to(weights.device), alpha=-rate)


def _orthogonal(shards: Tensor, like: Tensor, group: dict[str, Any]) -> Tensor:
    """Orthogonalise matrices from shards [K, m, n], each whole on one of the ranks that share it; return the shards."""
    if not isinstance(like, DTensor):
        return _newton_schulz(shards, group)
    mesh, done = like.device_mesh, list[tuple[_Cut, int]]()
    for cut in _cuts(like):
        if count := len(shards):  # a rank may get none of few matrices
            shards = cut.exchange(shards, mesh, count=count, to_matrices=True)
            done.append((cut, count))
    shards = _newton_schulz(shards, group)
    for cut, count in reversed(done):
        shards = cut.exchange(shards, mesh, count=count, to_matrices=False)
    return shards


class _Cut(NamedTuple):
    """A mesh axis whose ranks share matrices."""

    axis: int
    dim: int
    """The dimension of a matrix that is cut."""
    shape: tuple[int, ...]
    """The shape of what they share: a matrix, or the part of it that other axes leave."""

    def exchange(self, shards: Tensor, mesh: DeviceMesh, *, count: int, to_matrices: bool) -> Tensor:
        """Exchange parts of all `count` matrices for some whole ones, or back. A collective call."""
        shape = (count, *self.shape)
        # torch sees replicas along other axes: only the ranks of this one exchange something.
        parts, matrices = (
            [Shard(dim) if axis == self.axis else Replicate() for axis in range(mesh.ndim)] for dim in (self.dim + 1, 0)
        )
        source, target = (parts, matrices) if to_matrices else (matrices, parts)
        stride = torch.empty(shape, device="meta").stride()
        held = DTensor.from_local(shards, mesh, source, run_check=False, shape=torch.Size(shape), stride=stride)
        return held.redistribute(placements=target).to_local()


def _cuts(matrix: DTensor) -> list[_Cut]:
    """Return the cuts of a matrix, the last one first: FSDP2, whose axes are first, cuts what other axes leave."""
    mesh, shape, found = matrix.device_mesh, tuple(matrix.shape), list[_Cut]()
    for axis, (kind, place) in reversed(
        list(enumerate(zip(matrix.placements, mesh.get_coordinate() or (), strict=True)))
    ):
        if isinstance(kind, Replicate):
            continue
        assert isinstance(kind, Shard | _StridedShard if found else Shard), f"muon knows no matrix of parts as {kind}"
        dim, size = kind.dim, shape[kind.dim]
        found.append(_Cut(axis, dim, shape))
        width = -(-size // mesh.size(axis))
        shape = (*shape[:dim], len(range(size)[place * width : (place + 1) * width]), *shape[dim + 1 :])
    return found[::-1]


def _newton_schulz(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Replace each matrix of [K, M, N] with roughly the nearest orthogonal matrix; K can be 0."""
    arguments = group["ns_coefficients"], group["ns_steps"], group["eps"]
    for matrix in matrices:
        matrix.copy_(_zeropower_via_newtonschulz(matrix, *arguments))
    return matrices


def _newton_schulz_at_once(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Return roughly the nearest orthogonal matrix of each of [K, M, N], in few large products; K can be 0."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found / torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found


def _batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches of parameters of one shape and one way to share, with at most one per rank that shares them."""
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        kinds = parameter.placements if isinstance(parameter, DTensor) else ()
        alike.setdefault((parameter.shape, kinds), []).append(parameter)
    for members in alike.values():
        ranks = _ranks(members[0])
        for start in range(0, len(members), ranks):
            yield members[start : start + ranks]


def _ranks(parameter: Tensor) -> int:
    """Return the number of ranks that hold a shard of the parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not isinstance(placement, Replicate))
