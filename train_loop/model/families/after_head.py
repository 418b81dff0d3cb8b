"""A model's own steps between its head and its logits, such as a scale or a cap."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_POINTWISE = {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.tanh.default}
"""Operators whose results for a token depend only on the logits of that token."""
_CONVERSIONS = {aten._to_copy.default}
_VIEWS = {aten.slice.Tensor, aten.alias.default, aten.detach.default}


class Step(NamedTuple):
    """An operator on logits, with its numbers."""

    operator: Any
    numbers: tuple[Any, ...]
    named: dict[str, Any]


class HeadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the steps that a model takes with the output of its head."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._latest: Tensor | None = None
        self._steps: list[Step] = []

    def follow(self, output: Tensor) -> None:
        """Begin with the output of the head."""
        self._latest, self._steps = output, []

    def steps(self, logits: Tensor) -> tuple[Step, ...] | None:
        """Return the steps from the head to the logits; None if some of them are not pointwise."""
        return tuple(self._steps) if logits is self._latest else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._latest is None or not args or args[0] is not self._latest:
            return out
        if func in _VIEWS and out.shape == self._latest.shape:
            self._latest = out
        elif func in _CONVERSIONS or (func in _POINTWISE and not any(isinstance(one, Tensor) for one in args[1:])):
            named = {name: one for name, one in (kwargs or {}).items() if name == "dtype"}
            self._steps.append(Step(func, tuple(args[1:]), named))
            self._latest = out
        return out


def take_steps(steps: Sequence[Step], output: Tensor) -> Tensor:
    """Return the logits for an output of the head."""
    for step in steps:
        output = step.operator(output, *step.numbers, **step.named)
    return output
