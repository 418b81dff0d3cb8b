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
from train_loop.parallel.choices import KeptChoices


def apply_tiled_mlp(layers: Sequence[nn.Module], *, tiles: int) -> None:
    """Split the input of each layer's MLP into at most `tiles` tiles, so that only one tile's wide tensors exist.

    Bekman et al., "Arctic Long Sequence Training" (2025). The FSDP unit is the MLP or contains it, and is gathered once
    for all tiles. Ranks may therefore have different numbers of tiles, and gradients are reduced once. Raises
    ModelError for a layer without an MLP.
    """
    for layer in layers:
        mlps = [module for module in layer.children() if type(module).__name__.endswith("MLP")]
        if not mlps:
            raise ModelError(
                f"{type(layer).__name__} has no child module of a class named *MLP, so apply_tiled_mlp has no effect; "
                "set apply_tiled_mlp: false"
            )
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
