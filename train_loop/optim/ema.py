"""An exponential moving average of the weights (Polyak and Juditsky, 1992)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from train_loop.model.float8 import forget_scales
from train_loop.model.parts import memory_of
from train_loop.optim.by_mesh import by_mesh


class Ema:
    """fp32 averages of all trained weights by name, each sharded like its weight."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        # References are kept because a module exposes unsharded parameters instead while FSDP has them gathered.
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.averages: dict[str, Tensor] = {
            name: memory_of(weight).detach().to(torch.float32, copy=True) for name, weight in self._weights.items()
        }

    def update(self) -> None:
        """Move the averages towards the weights: decay x average + (1 - decay) x weight."""
        same = all(weight.dtype == torch.float32 for weight in self._weights.values())
        # Copies in fp32 of all weights at once would take the memory of another model.
        groups = self._names_by_mesh() if same else [[name] for name in self._weights]
        for names in groups:
            weights = [self._weights[name].detach().float() for name in names]
            self._average([self.averages[name] for name in names], weights, 0)

    def _names_by_mesh(self) -> list[list[str]]:
        names = {id(weight): name for name, weight in self._weights.items()}
        return [[names[id(weight)] for weight in part] for part in by_mesh(self._weights.values())]

    def begin(self, names: Iterable[str]) -> None:
        """Restart averages at the current weights."""
        for name in names:
            self.averages[name].copy_(self._weights[name].detach())

    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Load saved averages."""
        for name, average in self.averages.items():
            average.copy_(averages[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the model use the averages within the context, then restore its weights bit for bit.

        An average in its weight's dtype stores the weight meanwhile, so that the swap needs memory for only one tensor.
        """
        kept = dict[str, Tensor]()
        for name, weight in self._weights.items():
            own, average = weight.detach(), self.averages[name]
            kept[name] = own.clone()
            own.copy_(average)
            if average.dtype == own.dtype:
                average.copy_(kept.pop(name))
        forget_scales(self._weights.values())
        try:
            yield
        finally:
            for name, weight in self._weights.items():
                own, average = weight.detach(), self.averages[name]
                if name in kept:
                    own.copy_(kept.pop(name))
                else:
                    mean = own.clone()
                    own.copy_(average)
                    average.copy_(mean)
            forget_scales(self._weights.values())
