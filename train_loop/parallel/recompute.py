"""Activation checkpointing: what a layer computed is computed again when backward needs it (Chen et al., 2016)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


def apply_checkpointing(layers: Sequence[nn.Module], *, offload: bool, pin_memory: bool) -> None:
    """Keep only the input of each layer for backward; with `offload` it waits in (pinned) host memory.

    Inside the layer's call, so that FSDP's hooks gather its parameters once for recomputed forward and backward.
    """
    for layer in layers:
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = functools.partial(_offloaded, forward, pin_memory) if offload else forward


def _offloaded(forward: Callable[..., Any], pin_memory: bool, *inputs: Any, **options: Any) -> Any:
    # The hooks see what the checkpoint itself keeps, its positional inputs: masks and rotary tables, which all layers
    # share, come by name and stay where they are.
    with save_on_cpu(pin_memory=pin_memory):
        return forward(*inputs, **options)
