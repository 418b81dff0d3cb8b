"""Tensors on device meshes: shards, and operations on lists of tensors, each of which torch needs on one mesh."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the tensor's own memory; the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of each mesh; ranks that share experts have these on a mesh of their own."""
    found = dict[Any, list[Tensor]]()
    for one in tensors:
        found.setdefault(one.device_mesh if isinstance(one, DTensor) else None, []).append(one)
    return list(found.values())


class ByMesh(Optimizer):
    """An optimizer that steps the parameters of each mesh by themselves; groups and states stay as they are."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one step to every parameter that has a gradient."""
        groups = [(group, group["params"]) for group in self.param_groups]
        try:
            for part in by_mesh(p for _, parameters in groups for p in parameters):
                own = {id(p) for p in part}
                for group, parameters in groups:
                    group["params"] = [p for p in parameters if id(p) in own]
                super().step()
        finally:
            for group, parameters in groups:
                group["params"] = parameters
