"""Adafactor for sharded parameters (Shazeer and Stern, 2018).

The rule is that of transformers' Adafactor with an external learning rate (scale_parameter and relative_step off), as
its Trainer uses it. Neither that class nor torch's can take a step on DTensors.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import ParamsT

from train_loop.optim.by_mesh import local_of
from train_loop.optim.by_parameter import ByParameter

_TINY = 1e-30
"""Constant added to squared gradients, so that none of their means is zero."""


class Adafactor(ByParameter):
    """An optimizer with factored second moments, whose updates have an RMS of at most 1.

    The second moments of a matrix [M, N] are the means of its rows [M, 1] and of its columns [1, N].
    """

    def __init__(self, params: ParamsT, lr: float, *, weight_decay: float = 0.0, decay_rate: float = -0.8) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decay_rate": decay_rate})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Apply the rule to a parameter."""
        state = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0)).add_(1)
        weight = state["step"].item() ** group["decay_rate"]
        update = gradient * _inverse_root(state, gradient.square() + _TINY, weight)
        # The RMS of the whole parameter, not of a shard: reductions of DTensors are global.
        rms = _of_all_ranks(update.norm()) / update.numel() ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update * (group["lr"] / rms.clamp(min=1.0)))


def _inverse_root(state: dict[str, Any], squares: Tensor, weight: float) -> Tensor:
    """Return 1 / sqrt of the running second moment.

    Moves the moment by `weight` towards these squared gradients first.
    """
    if squares.ndim < 2:
        return _moved(state, "variance", squares, weight).rsqrt()
    rows = _moved(state, "row_mean", _mean(squares, dim=-1), weight)  # [M, 1]
    columns = _moved(state, "column_mean", _mean(squares, dim=-2), weight)  # [1, N]
    # A product of DTensors would gather rows or columns where ranks have parts of both.
    own = (local_of(rows) / local_of(_mean(rows, dim=-2))).rsqrt() * local_of(columns).rsqrt()
    if not isinstance(squares, DTensor):
        return own
    return DTensor.from_local(
        own, squares.device_mesh, squares.placements, run_check=False, shape=squares.shape, stride=squares.stride()
    )


def _moved(state: dict[str, Any], name: str, towards: Tensor, weight: float) -> Tensor:
    average: Tensor = state.setdefault(name, torch.zeros_like(towards))
    return average.lerp_(towards, weight)


def _mean(values: Tensor, *, dim: int) -> Tensor:
    # mean() would average the means of shards, whose sizes may differ.
    total = values.sum(dim=dim, keepdim=True) / values.shape[dim]
    return _of_all_ranks(total)


def _of_all_ranks(total: Tensor) -> Tensor:
    """Return a sum or norm from the parts of all ranks, along one mesh axis after the other."""
    for axis in range(total.device_mesh.ndim if isinstance(total, DTensor) else 0):
        assert isinstance(total, DTensor)
        kinds = list(total.placements)
        if kinds[axis].is_partial():
            kinds[axis] = Replicate()
            total = total.redistribute(placements=kinds)
    return total
