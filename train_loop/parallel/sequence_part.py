"""A rank's part of each sequence, for users' models that exchange parts themselves."""

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.parallel.ulysses import Exchanges, heads_to_seq, seq_to_heads
from train_loop.telemetry.timers import ComputeTimer

_PARTS: WeakKeyDictionary[nn.Module, "SequencePart"] = WeakKeyDictionary()
"""The part of each model whose ranks share sequences."""


class SequencePart(Exchanges):
    """Part number `rank` of the `ranks` equal parts of each sequence, and the exchanges between them."""

    def __init__(self, group: dist.ProcessGroup, timer: ComputeTimer) -> None:
        super().__init__(group, timer)
        self.rank = dist.get_rank(group)
        self._own_exchanges = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that share a sequence, for exchanges of the model's own."""
        self._own_exchanges = True
        return self.group

    def slice(self, length: int) -> slice:
        """Return this rank's part of a whole sequence."""
        width = length // self.ranks
        return slice(self.rank * width, (self.rank + 1) * width)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange [B, H, T/P, D] → [B, H/P, T, D]: a part of the sequence of all heads for all of it of some."""
        if x.ndim != 4 or x.shape[1] % self.ranks:
            raise ModelError(
                f"to_heads got a tensor of the shape {list(x.shape)}; expected [batch, heads, tokens, size] with heads "
                f"divisible by ulysses_size={self.ranks}; change the model or ulysses_size"
            )
        return seq_to_heads(x, self.group, owner=self.name)

    def to_sequence(self, x: Tensor) -> Tensor:
        """Exchange [B, H/P, T, D] → [B, H, T/P, D], the inverse of `to_heads`."""
        return heads_to_seq(x, self.group, owner=self.name)

    def watch(self, model: nn.Module) -> None:
        """Check from now on that each forward pass of the model exchanges something."""
        _PARTS[model] = self
        model.register_forward_pre_hook(lambda *_: self.exchanged.clear())
        model.register_forward_hook(self._check)

    def _check(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self.exchanged and not self._own_exchanges:
            raise ModelError(
                f"{type(model).__name__.removeprefix('FSDP')} exchanged nothing in its forward pass, so that each rank "
                "saw only its part of the sequence; call part.to_heads and part.to_sequence around attention, or "
                "choose ulysses_size: 1"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequencePart":
        return self


def part_of(model: nn.Module) -> SequencePart | None:
    """Return the part that a model was given; None if its ranks share no sequences."""
    return _PARTS.get(model)
