"""Bytes of the tensors that live during a call, counted on tensors without values."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the bytes of living tensors of a call, with those that it is `given`.

    Parameters do not count. Gradients of FSDP's root unit live until the end of backward, and count apart; those of
    `units` are reduced before, and do not count. Matrices of `tokens` by tokens, such as scores, do not count either.
    """

    def __init__(
        self, model: nn.Module, units: Iterable[nn.Module], given: Iterable[Tensor], *, tokens: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens = tokens
        self._numbers = weakref.WeakKeyDictionary[Any, int]()
        """Number of each living storage."""
        self._changes = list[tuple[int, int]]()
        """Numbers of storages with the bytes that begin or end, by time."""
        self._gradients, self._root = set[int](), set[int]()
        given = [*given]
        self._given = sum(one.nbytes for one in given)
        self._in_units = {id(parameter) for unit in units for parameter in unit.parameters()}
        for one in (*model.parameters(), *given):
            self._numbers[one.untyped_storage()] = -1
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._sort)  # type: ignore[no-untyped-call]

    def peak(self) -> tuple[int, int]:
        """Return the bytes of activations and of the root's gradients when both together are largest."""
        activations, gradients = self._given, 0
        found = activations, 0
        for number, size in self._changes:
            if number in self._root:
                gradients += size
            elif number not in self._gradients:
                activations += size
            found = max(found, (activations, gradients), key=sum)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and sum(size == self._tokens for size in value.shape) < 2:
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage not in self._numbers:
            number, size = len(self._changes), storage.nbytes()
            self._numbers[storage] = number
            self._changes.append((number, size))
            weakref.finalize(storage, self._changes.append, (number, -size))

    def _sort(self, parameter: Tensor) -> None:
        """Note whose gradient has been computed, and free those that FSDP reduces."""
        assert parameter.grad is not None
        in_unit = id(parameter) in self._in_units
        (self._gradients if in_unit else self._root).add(self._numbers.get(parameter.grad.untyped_storage(), -1))
        if in_unit:
            parameter.grad = None
