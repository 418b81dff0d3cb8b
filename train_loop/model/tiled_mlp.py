"""MLPs that process their tokens in tiles, so that only one tile's wide tensors exist at a time.

Bekman et al., "Arctic Long Sequence Training" (2025). The FSDP unit is the MLP or contains it, and is gathered once for
all tiles. Ranks may therefore have different numbers of tiles, and gradients are reduced once.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train_loop.errors import ModelError


def apply_tiled_mlp(layers: Sequence[nn.Module], *, tiles: int) -> None:
    """Split the input of each layer's MLP into at most `tiles` tiles. Raises ModelError for a layer without an MLP."""
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
