"""The bytes that a model keeps for its backward pass, counted in one call on the meta device."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from train_loop.model.families.anatomy import Anatomy
from train_loop.plan import KeptBytes


def count_kept(
    anatomy: Anatomy,
    every: Sequence[nn.Module],
    call: Callable[[], Tensor],
    *,
    tokens: int,
    tiles: Mapping[nn.Module, int],
    each: bool,
) -> KeptBytes:
    """Count the bytes that a call on meta keeps, by token; `call` has one row of `tokens`.

    Matrices of tokens by tokens, such as masks and scores, are left out: they do not grow with the tokens alone. Unless
    `each` layer is called, layers with parameters of the same shapes count as the first of them, and compute nothing.
    `tiles` has the MLPs that compute in tiles, and the number of tiles. They keep their inputs, and at most one tile of
    the model is computed again at a time.
    """
    count, first = _Count(anatomy.model, tokens), dict[object, nn.Module]()
    inner = {part for layer in every for part in layer.modules() if part is not layer}
    layers = [layer for layer in every if layer not in inner]
    alike = [first.setdefault(layer if each else _kind(layer), layer) for layer in layers]
    once = {layer: _Once(layer.forward) for layer in first.values()}
    for layer, one in zip(layers, alike, strict=True):
        layer.forward = once[one] if layer is one else once[one].repeat
    hooks = [layer.register_forward_pre_hook(count.enter, with_kwargs=True) for layer in layers]
    hooks += [mlp.register_forward_pre_hook(count.enter_tiles) for mlp in tiles]
    hooks += [module.register_forward_hook(count.leave) for module in (*layers, *tiles)]
    try:
        with torch.enable_grad(), saved_tensors_hooks(count.keep, lambda kept: kept):
            out = call()
    finally:
        for hook in hooks:
            hook.remove()
    inside = [count.bytes_of(layer) for layer in alike]
    largest = [
        max((-(-count.bytes_of(mlp) // tiles[mlp]) for mlp in layer.modules() if mlp in tiles), default=0)
        for layer in alike
    ]
    # Embeddings are as wide as the states of tokens, which are kept.
    outside = count.bytes_of(None, without=None if anatomy.labels == 0 else out.shape[-1])
    return KeptBytes(
        inputs=-(-count.inputs // tokens),
        layer=-(-max(map(sum, zip(inside, largest, strict=True)), default=0) // tokens),
        layers=-(-(sum(inside) + max(largest, default=0)) // tokens),
        outside=-(-outside // tokens),
    )


class _Count:
    """Tensors that a call keeps, by layer or MLP in tiles; None is outside of all."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._tokens, self._inside = tokens, list[nn.Module | None]([None])
        self._known = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._kept: dict[nn.Module | None, dict[int, Tensor]] = defaultdict(dict)
        """Kept tensors by storage; the reference keeps the place unique."""
        self.inputs = 0

    def enter(self, layer: nn.Module, inputs: Any, named: Any) -> None:
        """Begin a layer, whose inputs are kept also if it is computed again in backward."""
        self._inside.append(layer)
        for tensor in tree_leaves((inputs, named)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and _place(tensor) not in self._known:
                self._known.add(_place(tensor))
                self._kept[layer][-_place(tensor)] = tensor
                self.inputs += tensor.nbytes

    def enter_tiles(self, mlp: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Begin an MLP that computes in tiles, whose input its layer keeps."""
        for tensor in inputs:
            self.keep(tensor)
            self._known.add(_place(tensor))
        self._inside.append(mlp)

    def leave(self, *_: Any) -> None:
        """End a layer or MLP."""
        self._inside.pop()

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps."""
        if sum(size == self._tokens for size in tensor.shape) < 2 and _place(tensor) not in self._known:
            self._kept[self._inside[-1]][_place(tensor)] = tensor
        return tensor

    def bytes_of(self, layer: nn.Module | None, *, without: int | None = None) -> int:
        """Return the bytes that a layer keeps besides its inputs, but not those of logits, which are `without` wide."""
        kept = (tensor for place, tensor in self._kept[layer].items() if place > 0)
        return sum(one.untyped_storage().nbytes() for one in kept if one.shape[-1:] != (without,))


def _kind(layer: nn.Module) -> object:
    return type(layer), tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


class _Once:
    """A forward whose results others repeat as new tensors."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self._found = forward, None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self._found = self._forward(*inputs, **named)
        return self._found

    def repeat(self, *_: Any, **__: Any) -> Any:
        """Return new tensors like the results."""
        return tree_map_only(Tensor, lambda one: torch.empty_like(one, requires_grad=one.requires_grad), self._found)


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
