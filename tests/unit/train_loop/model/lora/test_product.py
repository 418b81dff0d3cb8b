"""Layers with an adapter compute what peft's own compute, in fewer passes."""

from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from train_loop.model.lora.adapters import ADAPTER
from train_loop.model.lora.product import OneProduct

FROZEN: dict[str, nn.Module] = {
    "linear": nn.Linear(24, 40, bias=False),
    "bias": nn.Linear(24, 40),
    "Conv1D": Conv1D(40, 24),
}


def pair(frozen: nn.Module, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return peft's layer around a frozen one, and a copy of it with the variant."""
    torch.manual_seed(0)
    transposed = isinstance(frozen, Conv1D)
    config = peft.LoraConfig(r=3, lora_alpha=10, lora_dropout=dropout, fan_in_fan_out=transposed)
    base = deepcopy(frozen).requires_grad_(requires_grad=False)
    plain: Any = Linear(base, ADAPTER, config=config, r=3, lora_alpha=10)
    nn.init.normal_(plain.lora_B[ADAPTER].weight)
    ours = deepcopy(plain.to(dtype))
    ours.lora_variant[ADAPTER] = OneProduct()
    return plain, ours


def results(layer: Any, x: Tensor) -> list[Tensor]:
    """Return output and gradients of a layer."""
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    out.float().square().sum().backward()
    assert leaf.grad is not None
    return [out.detach(), leaf.grad, layer.lora_A[ADAPTER].weight.grad, layer.lora_B[ADAPTER].weight.grad]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (2, 0, 24)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_outputs_and_gradients_are_those_of_peft(frozen: str, shape: tuple[int, ...], dropout: float) -> None:
    plain, ours = pair(FROZEN[frozen], dropout=dropout)
    x = torch.randn(shape)
    for one, other in zip(results(ours, x), results(plain, x), strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_half_precision_is_closer_to_exact_values_than_that_of_peft() -> None:
    plain, ours = pair(FROZEN["linear"], dtype=torch.bfloat16)
    x = torch.randn(64, 24).bfloat16()
    exact = deepcopy(plain).float()(x.float())
    off, theirs = ((layer(x).float() - exact).norm() for layer in (ours, plain))
    assert off < theirs


def test_layer_that_ranks_share_computes_as_peft_to_the_bit() -> None:
    """Tensor parallelism exchanges in hooks of the small layers, which the product does not call."""
    plain, ours = pair(FROZEN["linear"])
    called = list[nn.Module]()

    def doubled(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        called.append(module)
        return 2 * out

    for name in ("lora_A", "lora_B"):
        parts = [getattr(layer, name)[ADAPTER] for layer in (ours, plain)]
        hooks = [part.register_forward_hook(doubled) for part in parts]
        x = torch.randn(5, 24)
        assert torch.equal(ours(x), plain(x))
        assert called == parts
        called.clear()
        for hook in hooks:
            hook.remove()


def test_adapter_of_another_dtype_computes_as_peft_to_the_bit() -> None:
    plain, ours = pair(FROZEN["linear"])
    for layer in (plain, ours):
        layer.base_layer.bfloat16()
    x = torch.randn(5, 24).bfloat16()
    assert ours(x).dtype == torch.bfloat16
    assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("frozen", FROZEN)
def test_merged_weights_are_those_of_peft(frozen: str) -> None:
    plain, ours = pair(FROZEN[frozen])
    for layer in (plain, ours):
        layer.merge()
    assert torch.equal(ours.base_layer.weight, plain.base_layer.weight)
