"""Timing of a rank's computation, without its waits in FSDP2's units."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from train_loop.telemetry.timers import ComputeTimer


def time_units(model: nn.Module, timer: ComputeTimer) -> None:
    """Stop the timer while units gather parameters or reduce gradients, in every training pass.

    Call it after FSDP2 has made the units: FSDP2's hooks then run between the first and last hooks registered here.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _UnitHooks(module, timer)
    # FSDP2 reduces the root's gradients at the end of a pass, which has no hook.
    model.register_forward_pre_hook(lambda *_: timer.drop(), prepend=True)


class _UnitHooks:
    """Hooks around FSDP2's work at the start of a unit's forward, and at the start and end of its backward."""

    def __init__(self, unit: nn.Module, timer: ComputeTimer) -> None:
        self._timer = timer
        self._output: Any = None
        unit.register_forward_pre_hook(self._before_gather, prepend=True, with_kwargs=True)
        unit.register_forward_pre_hook(self._after_gather, with_kwargs=True)
        unit.register_forward_hook(self._before_pre_backward, prepend=True)
        unit.register_forward_hook(self._after_pre_backward)

    # A tensor's gradient hooks run in the order of registration, and FSDP2 registers its own in between. FSDP2 passes
    # new input tensors to the unit, and reduces gradients after those of the new tensors.

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
        # FSDP2 may have cast the output since, but its hook is on the original tensor.
        _at_gradient(self._output, self._timer.start)
        self._output = None


def _at_gradient(values: Any, act: Callable[[], None]) -> None:
    """Call `act` when the gradient of the first tensor that requires one is computed."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda _: act())  # type: ignore[no-untyped-call]
            return
