"""The forward pass of a layer with an adapter in which one product adds to the output of the frozen layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class OneProduct:
    """Variant of peft's linear layer: base(x) + B(scale * A(x)), of which the last product adds to the first.

    peft computes base(x) + scale * B(A(x)) in three passes over the outputs, which differs by rounding. It finds
    variants in `LoraLayer.lora_variant`, by the name of the adapter.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: object) -> Tensor:
        """Return the output [..., out] from an input [..., in] in the adapter's dtype and the frozen output."""
        a, b, scale = module.lora_A[active_adapter], module.lora_B[active_adapter], module.scaling[active_adapter]
        low: Tensor = a(module.lora_dropout[active_adapter](x))
        if result.dtype != low.dtype or not (_is_plain(a) and _is_plain(b)):
            whole: Tensor = result + b(low) * scale
            return whole
        rows = (low * scale).flatten(0, -2)
        return torch.addmm(result.flatten(0, -2), rows, b.weight.t()).view(result.shape)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        """Add the adapter to the frozen weight, as peft does without a variant."""
        orig_weight.data += module.get_delta_weight(active_adapter)


def _is_plain(module: nn.Module) -> bool:
    """Return whether a linear layer is only a product: tensor parallelism adds hooks, or another forward pass."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return not changed and not isinstance(module.weight, DTensor)
