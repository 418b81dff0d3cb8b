"""Names of a model's tensors with and without adapters: peft's layers take the places of modules."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

RENAMED = "names_without_adapters"
"""Attribute of a model with adapters: the names that modules inside of peft's layers had before."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters."""
    return hasattr(model, RENAMED)


def by_plain_name(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors of a model by the names that they have without adapters; adapters keep theirs."""
    return {plain_name(model, name): tensor for name, tensor in named}


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name of a tensor of a model without adapters; those of adapters keep theirs."""
    renamed: Mapping[str, str] = getattr(model, RENAMED, {})
    holder, _, leaf = name.rpartition(".")
    return f"{renamed[holder]}.{leaf}" if holder in renamed else name
