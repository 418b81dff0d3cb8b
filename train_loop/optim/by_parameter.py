"""The step of optimizers that update one parameter after the other."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ByParameter(Optimizer):
    """An optimizer with a rule for one parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one step to every parameter that has a gradient; a collective call if the rule has one."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter, and its state, with the settings of its group."""
        raise NotImplementedError
