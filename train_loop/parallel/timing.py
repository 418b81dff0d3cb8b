"""What a rank computes, told apart from what it waits for in FSDP2's units."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from train_loop.vitals import ComputeTimer


def time_units(model: nn.Module, timer: ComputeTimer) -> None:
    """Let the timer stand still while units gather parameters or reduce gradients, in every training pass.

    Called when the units are there: FSDP2's hooks then lie between those that are registered here as first and last.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _UnitHooks(module, timer)
    # Gradients of the root are reduced where a pass ends, which no hook tells.
    model.register_forward_pre_hook(lambda *_: timer.drop(), prepend=True)


class _UnitHooks:
    """Around what FSDP2 does where a unit's forward begins, its backward begins and its backward ends."""

    def __init__(self, unit: nn.Module, timer: ComputeTimer) -> None:
        self._timer = timer
        self._output: Any = None
        unit.register_forward_pre_hook(self._before_gather, prepend=True, with_kwargs=True)
        unit.register_forward_pre_hook(self._after_gather, with_kwargs=True)
        unit.register_forward_hook(self._before_pre_backward, prepend=True)
        unit.register_forward_hook(self._after_pre_backward)

    # A gradient reaches the hooks of its tensor in the order of their registration, and FSDP2 registers its own in
    # between; what goes into the unit's computation is a tensor of its own, behind which gradients are reduced.

    def _before_gather(self, unit: nn.Module, inputs: Any, named: Any) -> None:
        self._timer.stop()
        _at_gradient((inputs, named), self._timer.start)

    def _after_gather(self, unit: nn.Module, inputs: Any, named: Any) -> None:
        _at_gradient((inputs, named), self._timer.stop)
        if torch.is_grad_enabled():
            self._timer.start()

    def _before_pre_backward(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        self._output = output
        _at_gradient(output, self._timer.stop)

    def _after_pre_backward(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        # FSDP2 may have cast the output since, and listens to what it was.
        _at_gradient(self._output, self._timer.start)
        self._output = None


def _at_gradient(values: Any, act: Callable[[], None]) -> None:
    """Act when the gradient of the first tensor is there that has one."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda _: act())  # type: ignore[no-untyped-call]
            return
