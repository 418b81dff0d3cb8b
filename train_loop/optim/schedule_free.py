"""Schedule-free AdamW for sharded parameters (Defazio et al., "The Road Less Scheduled", 2024).

The rule is that of Meta's `schedulefree.AdamWScheduleFree`; its warm-up is the schedule's here. That class keeps counts
and sums for each group, which a checkpoint by parameter does not restore. It switches to averages in place, which does
not restore the bits of the weights.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from train_loop.optim.by_mesh import local_of
from train_loop.optim.by_parameter import ByParameter

_SCALARS = ("weight_sum", "lr_max")


class ScheduleFreeAdamW(ByParameter):
    """AdamW at three points: the model trains at y, the base steps z move fast, and x is the average of z.

    The parameters are y = (1 - beta1) z + beta1 x, and x follows from y and z. Evaluation and exports use x. Each
    operation rounds once, so that the bits do not depend on how a parameter is sharded. beta1 is above 0.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Apply the rule to a parameter."""
        state, (beta1, beta2), lr = self.state[parameter], group["betas"], float(group["lr"])
        if not state:
            state |= {"step": torch.tensor(0.0), **{name: torch.tensor(0.0, dtype=torch.float64) for name in _SCALARS}}
            state |= {"z": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        y, own = local_of(parameter), local_of(gradient)
        z, squares = local_of(state["z"]), local_of(state["exp_avg_sq"])
        if not state["step"]:
            # States begin at zero, also if a checkpoint is read into them.
            z.copy_(y)
        share = _count(state, lr)
        squares.mul_(beta2).add_(own.square().mul_(1 - beta2))
        unbiased = squares.div(1 - beta2 ** state["step"].item()).sqrt_().add_(group["eps"])
        update = torch.div(own, unbiased, out=unbiased)
        if group["weight_decay"]:
            update.add_(y.mul(group["weight_decay"]))
        y.add_((z - y).mul_(share)).add_(update.mul(lr * (beta1 * (1 - share) - 1)))
        z.sub_(update.mul_(lr))

    @torch.no_grad()
    def averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with a new tensor of its averaged weights x, sharded like it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                average, state = parameter.detach().clone(), self.state.get(parameter, {})
                if state and state["step"]:
                    x, z = local_of(average), local_of(state["z"])
                    x.add_((z.to(x.device) - x).mul_(1 - 1 / group["betas"][0]))
                yield parameter, average

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. torch would round sums to the dtype of the parameters, and move them to their device."""
        super().load_state_dict(state_dict)
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        for key, parameter in zip(keys, (p for group in self.param_groups for p in group["params"]), strict=True):
            if (saved := state_dict["state"].get(key)) is not None:
                self.state[parameter] |= {name: saved[name].clone() for name in ("step", *_SCALARS)}


def _count(state: dict[str, Any], lr: float) -> float:
    """Count a step, and return the share of the newest z in the average: its squared rate over the sum of all."""
    state["step"].add_(1)
    state["lr_max"].fill_(max(lr, state["lr_max"].item()))
    weight = state["lr_max"].item() ** 2
    state["weight_sum"].add_(weight)
    total: float = state["weight_sum"].item()
    return weight / total if total else 0.0


@contextmanager
def at_averages(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Make the model use the averaged weights of schedule-free optimizers within the context, then restore its bits.

    Needs the memory of these weights a second time.
    """
    kept = list[tuple[Tensor, Tensor]]()
    for parameter, average in averaged(optimizers):
        own = parameter.detach()
        kept.append((own, own.clone()))
        own.copy_(average)
    try:
        yield
    finally:
        for own, trained in kept:
            own.copy_(trained)


def averaged(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of schedule-free optimizers, each with a new tensor of its averaged weights."""
    for optimizer in optimizers:
        if isinstance(optimizer, ScheduleFreeAdamW):
            yield from optimizer.averages()
