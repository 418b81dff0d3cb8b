"""Gathering the parameters of layers before they are needed."""

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule


def apply_prefetch(layers: Sequence[FSDPModule], *, forward: int, backward: int) -> None:
    """Let each layer start the gathering of the next `forward` ones, and of the `backward` ones before it in backward.

    1 leaves it to FSDP, which gathers one ahead in the order that it has seen. The root is left alone.
    """
    for place, layer in enumerate(layers):
        if forward > 1:
            layer.set_modules_to_forward_prefetch(list(layers[place + 1 : place + 1 + forward]))
        if backward > 1:
            layer.set_modules_to_backward_prefetch(list(reversed(layers[max(place - backward, 0) : place])))
