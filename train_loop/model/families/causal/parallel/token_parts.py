"""Exchanges of ranks with a part of the tokens each, and of their gradients.

Shapes: T tokens, P ranks, H size of a state, F outputs of a projection. Tokens are the last dimension but one.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from train_loop.telemetry.timers import ComputeTimer

Change = Callable[[Tensor], Tensor]
_OPERATORS = torch.ops._c10d_functional
"""Collectives with the same name in every version of torch."""


class Parts(Protocol):
    """The exchanges of P ranks."""

    ranks: int

    def gather(self, part: Tensor) -> Tensor:
        """Return all tokens, [..., T/P, H] → [..., T, H]."""

    def sum(self, states: Tensor) -> Tensor:
        """Return this rank's part of the sum over ranks, [..., T, H] → [..., T/P, H]."""

    def own(self, states: Tensor) -> Tensor:
        """Return this rank's part, [..., T, H] → [..., T/P, H]."""


class SharedParts(Parts):
    """The parts of a group of ranks. The timer stops while they wait for each other."""

    def __init__(self, group: dist.ProcessGroup, timer: ComputeTimer) -> None:
        self.ranks, self._group, self._timer = group.size(), group, timer

    def gather(self, part: Tensor) -> Tensor:
        """Gather the parts of all ranks."""
        parts = self._wait(_OPERATORS.all_gather_into_tensor, part.contiguous())  # [P * B, ..., T/P, H]
        return parts.reshape(self.ranks, -1, *parts.shape[1:]).movedim(0, -3).flatten(-3, -2)

    def sum(self, states: Tensor) -> Tensor:
        """Reduce and scatter."""
        parts = self._split(states).movedim(-3, 0).flatten(0, 1)  # [P * B, ..., T/P, H]
        return self._wait(_OPERATORS.reduce_scatter_tensor, parts.contiguous(), "sum")

    def own(self, states: Tensor) -> Tensor:
        """Copy this rank's part: a view would keep all tokens in memory."""
        return self._split(states).select(-3, dist.get_rank(self._group)).clone(memory_format=torch.contiguous_format)

    def _split(self, states: Tensor) -> Tensor:
        return states.reshape(*states.shape[:-2], self.ranks, -1, states.shape[-1])

    def _wait(self, exchange: Callable[..., Tensor], *inputs: Tensor | str) -> Tensor:
        with self._timer.waiting():
            result: Tensor = _OPERATORS.wait_tensor(exchange(*inputs, self.ranks, self._group.group_name))
        return result


class CountedParts(Parts):
    """The parts of one of P ranks in a call without values, which exchanges nothing."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def gather(self, part: Tensor) -> Tensor:
        """Return a tensor of the size of all tokens."""
        return part.new_empty((*part.shape[:-2], part.shape[-2] * self.ranks, part.shape[-1]))

    def sum(self, states: Tensor) -> Tensor:
        """Return a tensor of the size of a part."""
        return states.new_empty((*states.shape[:-2], states.shape[-2] // self.ranks, states.shape[-1]))

    own = sum


class _Exchange(torch.autograd.Function):
    """An exchange of states, and the one of their gradients."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def exchange(states: Tensor, there: Change, back: Change) -> Tensor:
    """Exchange states by `there`, and their gradients by `back`."""
    found: Tensor = _Exchange.apply(states, there, back)  # type: ignore[no-untyped-call]
    return found


class GatheredInput:
    """The gathered input of several projections, which keep for backward only the part that it was gathered from."""

    def __init__(self, gather: Change) -> None:
        self.users = 0
        self._gather = gather
        self._states: Tensor | None = None

    def project(self, states: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return a linear projection of the gathered states, [..., T, H] → [..., T, F]; `part` is [..., T/P, H]."""
        out: Tensor = _Projection.apply(states, part.detach(), weight, bias, self)  # type: ignore[no-untyped-call]
        return out

    def again(self, part: Tensor) -> Tensor:
        """Return all tokens of the kept part, gathered once for all users."""
        states = self._gather(part) if self._states is None else self._states
        self.users -= 1
        self._states = states if self.users > 0 else None
        return states


class _Projection(torch.autograd.Function):
    """A linear projection of gathered states that keeps their part for backward, and gathers it again."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, source: GatheredInput
    ) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.source = source
        source.users += ctx.needs_input_grad[2]
        return F.linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_states, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)  # [B * T, F]
        return (
            gradient @ weight if needs_states else None,
            None,
            rows.T @ ctx.source.again(part).flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )
