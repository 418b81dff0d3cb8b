"""Keys and values of earlier tokens, as attention keeps them if ranks share sequences.

n: rows, K: kv heads of a rank, T: columns, D: head size.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class AttentionStates:
    """Keys and values [n, K, T, D] of each call of attention in a forward pass, in the order of the calls."""

    def __init__(self) -> None:
        self._kept = list[tuple[Tensor, Tensor]]()
        self._next = 0
        self.extends = False
        """True if the current forward pass adds tokens to those of earlier passes."""

    @property
    def columns(self) -> int:
        """Return the number of columns so far."""
        return self._kept[0][0].shape[2] if self._kept else 0

    def begin(self) -> None:
        """Begin a forward pass."""
        self._next, self.extends = 0, bool(self._kept)

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the columns of the next call of attention, and return its keys and values of all columns."""
        if self.extends:
            keys, values = self._kept[self._next]
            self._kept[self._next] = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        else:
            self._kept.append((key, value))
        self._next += 1
        return self._kept[self._next - 1]

    def align(self, lengths: Tensor) -> None:
        """Move rows of `lengths` [n] tokens to the right, so that their last tokens share a column."""
        width = self.columns
        columns = torch.arange(width, device=lengths.device)
        places = (columns - (width - lengths[:, None])).clamp(min=0)[:, None, :, None]
        for call, (keys, values) in enumerate(self._kept):
            self._kept[call] = keys.take_along_dim(places, 2), values.take_along_dim(places, 2)


class KeepingAttention(Protocol):
    """An `Attention` that adds keys and values to `states`, if it has any, and attends to all of them."""

    states: AttentionStates | None

    def __call__(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of a module."""
