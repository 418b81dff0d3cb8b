"""Lion for sharded parameters (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from train_loop.optim.by_mesh import local_of
from train_loop.optim.by_parameter import ByParameter


class Lion(ByParameter):
    """An optimizer whose updates are signs of an average of momentum and gradient; weight decay is decoupled.

    Each operation rounds once, so that the bits do not depend on how a parameter is sharded.
    """

    def __init__(
        self, params: ParamsT, lr: float, *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Apply the rule to a parameter."""
        (beta1, beta2), state = group["betas"], self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        weights, momentum, own = local_of(parameter), local_of(state["exp_avg"]), local_of(gradient)
        direction = momentum.mul(beta1).add_(own.mul(1 - beta1)).sign_()
        weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction.mul_(group["lr"]))
        momentum.mul_(beta2).add_(own.mul(1 - beta2))
