"""Muon for sharded matrices.

Jordan et al., "Muon" (2024), and Liu et al., "Muon is Scalable for LLM Training" (2025). Shapes: M rows and N columns
of a matrix, K matrices of one shape, W ranks that share them.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz


class Muon(torch.optim.Muon):
    """torch's Muon for sharded matrices, bit-equal to torch's own on whole ones.

    torch's step fails on a matrix with fewer rows than ranks, and otherwise sums each product over ranks in bf16. This
    class takes matrices of one shape in batches of one per rank. An all-to-all gives each rank a whole matrix, and a
    second one returns the shards of all updates.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one step to every parameter that has a gradient; a collective call."""
        for group in self.param_groups:
            for batch in _batches([p for p in group["params"] if p.grad is not None]):
                self._step(batch, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        directions = torch.stack([self._direction(p, group) for p in parameters])  # [K, M/W, N]
        updates = _orthogonal(directions, parameters[0], group)
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameters[0].shape)
        for parameter, update in zip(parameters, updates, strict=True):
            local = _local(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            # Offloaded parameters are on the CPU, and DTensors communicate on the mesh's device.
            local.add_(update.to(local.device), alpha=-rate)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the smoothed gradient's shard [M/W, N] in bf16, the dtype of the Newton-Schulz iterations."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, smoothed = _local(parameter.grad), _local(state["momentum_buffer"])
        smoothed.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(smoothed, group["momentum"]) if group["nesterov"] else smoothed).bfloat16()


def _orthogonal(shards: Tensor, like: Tensor, group: dict[str, Any]) -> Tensor:
    """Orthogonalise matrices from shards [K, M/W, N], each whole on one of W ranks; return the shards."""
    if not isinstance(like, DTensor):
        return _newton_schulz(shards, group)
    mesh, shape = like.device_mesh, (len(shards), *like.shape)
    by_row = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]
    by_matrix = [Shard(0) if isinstance(p, Shard) else p for p in like.placements]
    stride = torch.empty(shape, device="meta").stride()
    rows = DTensor.from_local(shards, mesh, by_row, run_check=False, shape=torch.Size(shape), stride=stride)
    own = _newton_schulz(rows.redistribute(placements=by_matrix).to_local(), group)  # [K/W, M, N]
    whole = DTensor.from_local(own, mesh, by_matrix, run_check=False, shape=torch.Size(shape), stride=stride)
    return whole.redistribute(placements=by_row).to_local()


def _newton_schulz(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Replace each matrix of [K, M, N] with roughly the nearest orthogonal matrix; K can be 0."""
    arguments = group["ns_coefficients"], group["ns_steps"], group["eps"]
    for matrix in matrices:
        matrix.copy_(_zeropower_via_newtonschulz(matrix, *arguments))
    return matrices


def _batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches of parameters of one shape, with at most one per rank that shares them."""
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.shape, _ranks(parameter)), []).append(parameter)
    for (_, ranks), members in alike.items():
        for start in range(0, len(members), ranks):
            yield members[start : start + ranks]


def _ranks(parameter: Tensor) -> int:
    """Return the number of ranks that hold a shard of the parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Shard))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
