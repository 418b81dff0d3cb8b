"""Choices of experts, which recomputation repeats: rounding could otherwise send a token to others than in forward."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_TOPK, _MAX = torch.ops.aten.topk.default, torch.ops.aten.max.dim
"""Operations by which routers choose; each returns values and their places."""


class KeptChoices:
    """The places that routers choose in a layer's forward pass, for its recomputation.

    torch's selective checkpointing would keep values, too, which some routers change in place. It would also see each
    operation of a layer, and not only those of its router.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self.mode: TorchDispatchMode | None = None
        """Mode in which routers compute; None outside of layers that are or will be recomputed."""
        for router in routers:
            router.forward = functools.partial(self._route, router.forward)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a layer's forward pass and of its recomputation, as `checkpoint` wants them."""
        kept = list[Tensor]()
        return _Routing(self, lambda: _Keep(kept)), _Routing(self, lambda: _Repeat(kept))

    def _route(self, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        if self.mode is None:
            return forward(*inputs, **named)
        with self.mode:
            return forward(*inputs, **named)


class _Routing(AbstractContextManager[None]):
    """A context in which routers compute in a mode."""

    def __init__(self, choices: KeptChoices, mode: Callable[[], TorchDispatchMode]) -> None:
        self._choices, self._mode = choices, mode

    def __enter__(self) -> None:
        self._choices.mode = self._mode()

    def __exit__(self, *_: object) -> None:
        self._choices.mode = None


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep the places of each choice, as copies that the router cannot change."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (_TOPK, _MAX):
            # Half the memory, and enough for the number of experts.
            self._kept.append(found[1].int())
        return found


class _Repeat(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Take the values at the kept places, in the order in which they were kept.

    It acts below autograd, so that gradients are those of the same operations. Other modes do not see it: selective
    checkpointing rejects operations that the forward pass did not have.
    """

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = iter(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (_TOPK, _MAX):
            return func(*args, **(kwargs or {}))
        with _disable_current_modes():
            return self._topk(*args) if func is _TOPK else self._max(*args)

    def _topk(self, scores: Tensor, _: int, dim: int = -1, *__: bool) -> tuple[Tensor, Tensor]:
        places = next(self._places).long()
        return scores.gather(dim, places), places

    def _max(self, scores: Tensor, dim: int, keeps: bool = False) -> tuple[Tensor, Tensor]:
        places = next(self._places).long()
        values = scores.gather(dim, places if keeps else places.unsqueeze(dim))
        return values if keeps else values.squeeze(dim), places
