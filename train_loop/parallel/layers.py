"""Changes to layers: MLPs in tiles, activation checkpointing, compilation. Each is inside the layer's call.

FSDP's hooks, also those of units inside the layer, therefore stay outside of all three.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, noop_context_fn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.choices import KeptChoices


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
    outputs = [checkpoint(forward, part, use_reentrant=False) for part in parts]
    return torch.cat(outputs).view(*x.shape[:-1], -1)


def apply_checkpointing(
    layers: Sequence[nn.Module], *, offload: bool, pin_memory: bool, routers: Sequence[nn.Module] = ()
) -> None:
    """Keep only the input of each layer for backward, which recomputes the rest (Chen et al., 2016).

    `offload` stores the inputs in (pinned) host memory. FSDP gathers the parameters once for recomputation and
    backward. The choices of `routers` are kept, too.
    """
    contexts = KeptChoices(routers).contexts if routers else noop_context_fn
    for layer in layers:
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        layer.forward = functools.partial(_offloaded, forward, pin_memory) if offload else forward


def _offloaded(forward: Callable[..., Any], pin_memory: bool, *inputs: Any, **options: Any) -> Any:
    # The hooks see the tensors that the checkpoint itself keeps, its positional inputs. Masks and rotary tables, which
    # all layers share, are keyword arguments and are not offloaded.
    with save_on_cpu(pin_memory=pin_memory):
        return forward(*inputs, **options)


def apply_compile(layers: Sequence[nn.Module]) -> None:
    """Compile the inside of each layer's call."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
