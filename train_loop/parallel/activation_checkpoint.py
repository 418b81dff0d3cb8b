"""Activation checkpointing: backward recomputes the activations of each layer (Chen et al., 2016)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


def apply_checkpointing(layers: Sequence[nn.Module], *, offload: bool, pin_memory: bool) -> None:
    """Keep only the input of each layer for backward; `offload` stores it in (pinned) host memory.

    It applies inside the layer's call, so that FSDP's hooks gather the parameters once for recomputation and backward.
    """
    for layer in layers:
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = functools.partial(_offloaded, forward, pin_memory) if offload else forward


def _offloaded(forward: Callable[..., Any], pin_memory: bool, *inputs: Any, **options: Any) -> Any:
    # The hooks see the tensors that the checkpoint itself keeps, its positional inputs. Masks and rotary tables, which
    # all layers share, are keyword arguments and are not offloaded.
    with save_on_cpu(pin_memory=pin_memory):
        return forward(*inputs, **options)
