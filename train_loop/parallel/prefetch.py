"""Prefetching of the parameters of layers."""

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule


def apply_prefetch(layers: Sequence[FSDPModule], *, forward: int, backward: int) -> None:
    """Make each layer prefetch the next `forward` layers, and in backward the previous `backward` layers.

    A value of 1 leaves prefetching to FSDP, which gathers one layer ahead in the order that it has seen. The root is
    not changed.
    """
    for place, layer in enumerate(layers):
        if forward > 1:
            layer.set_modules_to_forward_prefetch(list(layers[place + 1 : place + 1 + forward]))
        if backward > 1:
            layer.set_modules_to_backward_prefetch(list(reversed(layers[max(place - backward, 0) : place])))
