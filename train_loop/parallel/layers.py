"""Changes to layers: MLPs in tiles, activation checkpointing, compilation. Each is inside the layer's call.

FSDP's hooks, also those of units inside the layer, therefore stay outside of all three.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.kept import KeptResults
from train_loop.parallel.choices import KeptChoices
from train_loop.spec import Checkpointing, EverySpec

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Return the contexts of a layer's forward pass and of its recomputation."""


def tiled_mlps(anatomy: Anatomy, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the MLPs of a model's layers that can compute in tiles; of a mixture of experts the dense ones.

    Dense are the MLPs of layers without experts, and shared experts, which every token uses. Raises ModelError for a
    layer without an MLP, and for a mixture that has no dense one.
    """
    if anatomy.experts is not None:
        return _dense_mlps(anatomy, layers)
    found = list[nn.Module]()
    for layer in layers:
        mlps = [module for module in layer.children() if _is_mlp(module)]
        if not mlps:
            raise ModelError(
                f"{type(layer).__name__} has no child module of a class named *MLP, so apply_tiled_mlp has no effect; "
                "set apply_tiled_mlp: false"
            )
        found += mlps
    return found


def _dense_mlps(anatomy: Anatomy, layers: Sequence[nn.Module]) -> list[nn.Module]:
    assert anatomy.experts is not None, "the caller has checked"
    # Tiles of a module with experts would choose experts apart, and count loads several times.
    routed = {*anatomy.experts.modules, *anatomy.experts.routers}
    inside = {part for module in routed for part in module.modules()}
    mlps = [
        module
        for layer in layers
        for module in layer.modules()
        if _is_mlp(module) and module not in inside and routed.isdisjoint(module.modules())
    ]
    if not mlps:
        raise ModelError(
            "apply_tiled_mlp computes dense MLPs in tiles, of layers without experts and of shared experts, and "
            f"{type(anatomy.model).__name__} has no class named *MLP besides its routed experts; set apply_tiled_mlp: "
            "false"
        )
    return list(dict.fromkeys(mlps))


def _is_mlp(module: nn.Module) -> bool:
    return type(module).__name__.endswith("MLP")


def apply_tiled_mlp(mlps: Sequence[nn.Module], *, tiles: int) -> None:
    """Split the input of each MLP into at most `tiles` tiles, so that only one tile's wide tensors exist.

    Bekman et al., "Arctic Long Sequence Training" (2025). The FSDP unit is the MLP or contains it, and is gathered once
    for all tiles. Ranks may therefore have different numbers of tiles, and gradients are reduced once.
    """
    for mlp in mlps:
        mlp.forward = functools.partial(_tiled, mlp.forward, tiles)


def _tiled(forward: Callable[[Tensor], Tensor], tiles: int, x: Tensor) -> Tensor:
    """Compute [..., H] → [..., H] and recompute each tile in backward; there may be fewer rows than tiles."""
    parts = x.flatten(0, -2).chunk(tiles)
    # In compiled graphs, the compiler chooses what tiles keep.
    compute = forward if torch.compiler.is_compiling() else functools.partial(_TILE.compute, forward)
    outputs = [checkpoint(compute, part, use_reentrant=False) for part in parts]
    return torch.cat(outputs).view(*x.shape[:-1], -1)


class _Tile:
    """The tile that computes, of which nothing is kept."""

    computes = False
    """True while a tile's forward pass runs."""

    def compute(self, forward: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        self.computes = True
        try:
            return forward(part)
        finally:
            self.computes = False


_TILE = _Tile()


def apply_checkpointing(
    layers: Sequence[nn.Module], how: Checkpointing, *, pin_memory: bool = False, routers: Sequence[nn.Module] = ()
) -> None:
    """Keep only the input of each layer for backward, which recomputes the rest (Chen et al., 2016).

    `offload` stores the inputs in (pinned) host memory. `{every: n}` recomputes the first of each n layers: the last
    layers, with which backward begins, are then rarely recomputed beside all kept activations. `selective` also keeps
    results of attention and matrix products. FSDP gathers the parameters once for recomputation and backward. The
    choices of `routers` are kept, too.
    """
    contexts: Contexts = KeptChoices(routers).contexts if routers else noop_context_fn
    if how == "selective":
        contexts = functools.partial(_selective, contexts)
    # torch.compile does not translate a call that names noop_context_fn, though it is the default.
    named: dict[str, Any] = {} if contexts is noop_context_fn else {"context_fn": contexts}
    for layer in layers[:: how.every] if isinstance(how, EverySpec) else layers:
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **named)
        layer.forward = functools.partial(_offloaded, forward, pin_memory) if how == "offload" else forward


def _selective(inner: Contexts) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts in which a layer keeps results, with other contexts inside of them."""
    outside: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    outside = create_selective_checkpoint_contexts(_Selection())  # type: ignore[no-untyped-call]
    if inner is noop_context_fn:
        # torch.compile knows these contexts.
        return outside
    first, again = zip(outside, inner(), strict=True)
    return _Both(*first), _Both(*again)


class _Both(AbstractContextManager[None]):
    """Two contexts as one, which may be entered several times."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._contexts, self._entered = (outer, inner), ExitStack()

    def __enter__(self) -> None:
        for one in self._contexts:
            self._entered.enter_context(one)

    def __exit__(self, *_: object) -> None:
        self._entered.close()


class _Selection(KeptResults):
    """The policy of `selective` for one forward pass of a layer; nothing inside of tiles is kept."""

    def __call__(self, context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        keeps = not _TILE.computes and self.keeps(operation, inputs, named, context.op_output)
        if self.changed:
            raise ModelError(
                f"gradient_checkpointing=selective keeps results of matrix products, and {operation.name()} of a layer "
                "changes one in place; choose full or {every: 2}"
            )
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _offloaded(forward: Callable[..., Any], pin_memory: bool, *inputs: Any, **options: Any) -> Any:
    # The hooks see the tensors that the checkpoint itself keeps, its positional inputs. Masks and rotary tables, which
    # all layers share, are keyword arguments and are not offloaded.
    with save_on_cpu(pin_memory=pin_memory):
        return forward(*inputs, **options)


def apply_compile(layers: Sequence[nn.Module], *, budget: float | None = None) -> None:
    """Compile the inside of each layer's call; dropout draws the same values as without a compiler.

    With a `budget`, the compiler keeps this share of the activations, and recomputes the cheapest others
    (torch._functorch.config.activation_memory_budget).
    """
    for layer in layers:
        compiled = torch.compile(layer.forward, options={"fallback_random": True})
        layer.forward = compiled if budget is None else functools.partial(_within_budget, compiled, budget)


def _within_budget(forward: Callable[..., Any], budget: float, *inputs: Any, **named: Any) -> Any:
    # Compilation happens in a call, and other models of the process may have other budgets.
    with functorch_config.patch(activation_memory_budget=budget):
        return forward(*inputs, **named)
