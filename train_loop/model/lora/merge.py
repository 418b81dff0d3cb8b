"""Adapters added to the weights below them (`W + s·B·A`), by peft's own rule and one layer at a time."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train_loop.model.lora.names import by_plain_name


def layers_with_adapters(model: nn.Module) -> dict[str, str]:
    """Return the outermost layer with adapters around each frozen weight below one, by the weight's plain name."""
    outer = list[str]()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not (outer and name.startswith(f"{outer[-1]}.")):
            outer.append(name)
    return {
        plain: layer
        for layer in outer
        for plain in by_plain_name(model, _frozen(layer, model.get_submodule(layer)).items())
    }


def merged_layer(model: nn.Module, layer: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the weights of a layer with its adapters added, in fp32, by their plain names.

    The model has adapters and is on meta. `read` returns a parameter's value by its name in this model.
    """
    made = copy.deepcopy(model.get_submodule(layer)).to_empty(device="cpu")
    for leaf, parameter in made.named_parameters():
        parameter.data = read(f"{layer}.{leaf}").to(torch.float32, copy=True)
    with torch.no_grad():
        layers: list[Any] = [module for module in made.modules() if hasattr(module, "lora_A")]
        for one in layers:
            one.merge()
    return by_plain_name(model, _frozen(layer, made).items())


def _frozen(layer: str, module: nn.Module) -> Mapping[str, Tensor]:
    return {f"{layer}.{leaf}": p.detach() for leaf, p in module.named_parameters() if not p.requires_grad}
