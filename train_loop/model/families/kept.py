"""Results that a model keeps for its backward pass: those of `selective`, and their bytes in a call on meta."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.live_bytes import LiveBytes
from train_loop.plan import KeptBytes

KEPT_PRODUCTS = frozenset({"aten::mm", "aten::addmm"})
"""Matrix products, of which `selective` keeps the results of the first, the third, and so on in each layer."""
KEPT_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Attention kernels, whose results `selective` keeps unless they draw random numbers."""


class KeptResults:
    """The results that `selective` keeps in one forward pass of a layer: attention, and every second matrix product.

    This is the list of torchtitan's selective activation checkpointing by operation
    (torchtitan/distributed/activation_checkpoint.py), with products that add a bias. Grouped products of experts are
    repeated, because transformers adds biases to them in place; so are exchanges between ranks. Kernels that draw
    random numbers are repeated too: the generator of the recomputation would otherwise not advance, and later
    operations would drop other values. The caller holds kept results while the layer computes.
    """

    def __init__(self) -> None:
        self.changed = False
        """True if an operation has changed a kept result in place, which the recomputation would do again."""
        self._products = 0
        self._kept = set[int]()
        """Storages of kept results."""

    def keeps(self, operation: Any, inputs: Sequence[Any], named: Mapping[str, Any], out: Any) -> bool:
        """Return whether the result of the next operation is kept."""
        if self._kept and not self.changed:
            self.changed = any(_place(one) in self._kept for one in _written(operation, inputs, named))
        if kept := self._chooses(operation, inputs, named):
            self._kept |= {_place(one) for one in tree_leaves(out) if isinstance(one, Tensor)}
        return kept

    def _chooses(self, operation: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> bool:
        name = operation.name()
        if name in KEPT_PRODUCTS:
            self._products += 1
            return self._products % 2 == 1
        return name in KEPT_ATTENTION and not _drops(operation, inputs, named)


def _written(operation: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = [
        inputs[place] if place < len(inputs) else named.get(one.name)
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    return [one for one in tree_leaves(written) if isinstance(one, Tensor)]


def _drops(kernel: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a kernel of attention drops values at random."""
    if "dropout_p" in named:
        return bool(named["dropout_p"])
    names = [one.name for one in kernel._schema.arguments] if hasattr(kernel, "_schema") else []
    place = names.index("dropout_p") if "dropout_p" in names else len(inputs)
    return place < len(inputs) and bool(inputs[place])


class ChangedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that looks for results that `selective` keeps and a layer changes in place afterwards.

    The recomputation would change them twice.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        self._policy: KeptResults | None = None
        self._hooks = [layer.register_forward_pre_hook(self._enter) for layer in layers]
        self._hooks += [layer.register_forward_hook(self._leave) for layer in layers]

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._policy is not None:
            if self._policy.keeps(func, args, kwargs or {}, out):
                self._kept.append(out)
            self.found |= self._policy.changed
        return out

    def _enter(self, *_: Any) -> None:
        self._policy, self._kept = KeptResults(), list[Any]()

    def _leave(self, *_: Any) -> None:
        self._policy = None


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
        with torch.enable_grad(), saved_tensors_hooks(count.keep, lambda kept: kept), _Results(count):
            out = call()
    finally:
        for hook in hooks:
            hook.remove()
    kinds = {_kind(layer): layer for layer in first.values()}
    peaks = [0] if tiles else [_peak(layer, once[layer], tokens) for layer in kinds.values()]
    inside = [count.bytes_of(layer) for layer in alike]
    inputs = sum(count.kept_inputs[layer] for layer in alike)
    largest = [
        max((-(-count.bytes_of(mlp) // tiles[mlp]) for mlp in layer.modules() if mlp in tiles), default=0)
        for layer in alike
    ]
    # Embeddings are as wide as the states of tokens, which are kept.
    outside = count.bytes_of(None, without=None if anatomy.labels == 0 else out.shape[-1])
    return KeptBytes(
        inputs=-(-count.inputs // tokens),
        layer=-(-max(map(sum, zip(inside, largest, strict=True)), default=0) // tokens),
        layers=-(-(sum(inside) + inputs + max(largest, default=0)) // tokens),
        outside=-(-outside // tokens),
        selected=-(-sum(count.selected[layer] for layer in alike) // tokens),
        peak=-(-max(peaks, default=0) // tokens) if all(peaks) else 0,
    )


def _peak(layer: nn.Module, once: "_Once", tokens: int) -> int:
    """Return the most bytes that a layer has when it is computed and differentiated alone; 0 if it cannot be called."""
    inputs, named = tree_map_only(Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), once.inputs)
    given = [one for one in (*layer.buffers(), *tree_leaves((inputs, named))) if isinstance(one, Tensor)]
    with suppress(Exception), torch.enable_grad(), LiveBytes(layer, [layer], given, tokens=tokens) as live:
        results = [one for one in tree_leaves(once.forward(*inputs, **named)) if isinstance(one, Tensor)]
        results = [one for one in results if one.requires_grad]
        torch.autograd.backward(results, [torch.empty_like(one) for one in results])
        activations: int = live.peak()[0] - sum(one.nbytes for one in given)
        return activations
    return 0


class _Count:
    """Tensors that a call keeps, by layer or MLP in tiles; None is outside of all."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._tokens, self._inside = tokens, list[nn.Module | None]([None])
        self._known = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._kept: dict[nn.Module | None, dict[int, Tensor]] = defaultdict(dict)
        """Kept tensors by storage; the reference keeps the place unique."""
        self.inputs = 0
        self._inputs: dict[int, int] = {}
        """Bytes of inputs of layers that nothing has kept yet, by storage."""
        self.kept_inputs: dict[nn.Module | None, int] = defaultdict(int)
        """Bytes of its inputs that a layer keeps, as a norm does in fp32."""
        self.selected: dict[nn.Module | None, int] = defaultdict(int)
        """Bytes of the matrix products that `selective` keeps, by layer."""
        self._products: dict[nn.Module | None, KeptResults] = defaultdict(KeptResults)
        self._results = list[Tensor]()

    def note(self, result: Tensor, operation: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Note the result of an operation."""
        layer = self._inside[-1]
        if layer is not None and self._products[layer].keeps(operation, inputs, named, result):
            self.selected[layer] += result.nbytes
            self._results.append(result)

    def enter(self, layer: nn.Module, inputs: Any, named: Any) -> None:
        """Begin a layer, whose inputs are kept also if it is computed again in backward."""
        self._inside.append(layer)
        for tensor in tree_leaves((inputs, named)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and _place(tensor) not in self._known:
                self._known.add(_place(tensor))
                self._kept[layer][-_place(tensor)] = tensor
                self.inputs += tensor.nbytes
                self._inputs[_place(tensor)] = tensor.nbytes

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
        self.kept_inputs[self._inside[-1]] += self._inputs.pop(_place(tensor), 0)
        if sum(size == self._tokens for size in tensor.shape) < 2 and _place(tensor) not in self._known:
            self._kept[self._inside[-1]][_place(tensor)] = tensor
        return tensor

    def bytes_of(self, layer: nn.Module | None, *, without: int | None = None) -> int:
        """Return the bytes that a layer keeps besides its inputs, but not those of logits, which are `without` wide."""
        kept = (tensor for place, tensor in self._kept[layer].items() if place > 0)
        return sum(one.untyped_storage().nbytes() for one in kept if one.shape[-1:] != (without,))


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that shows each operation to a count."""

    def __init__(self, count: _Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._count.note(out, func, args, kwargs or {})
        return out


def _kind(layer: nn.Module) -> object:
    return type(layer), tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


class _Once:
    """A forward whose results others repeat as new tensors."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self._found = forward, None
        self.inputs: tuple[Any, Any] = (), {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.inputs = inputs, named
        self._found = self.forward(*inputs, **named)
        return self._found

    def repeat(self, *_: Any, **__: Any) -> Any:
        """Return new tensors like the results."""
        return tree_map_only(Tensor, lambda one: torch.empty_like(one, requires_grad=one.requires_grad), self._found)


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
