"""The FSDP units of a sharded model by class, and its module tree."""

from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train_loop.plan import UnitGroup, UnitTree

_PREFIX = "FSDP"
"""Beginning of the names of classes that `fully_shard` makes."""
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LONGEST_TREE = 32 * 1024
"""Maximum characters of a tree: it is a field of an event."""


class _Kind(NamedTuple):
    module: str
    parameters: int
    size: int
    dtype: str


def unit_tree(model: nn.Module) -> UnitTree:
    """Return the units of a sharded model, the outermost first, and its modules as `print(model)` shows them.

    Layers that are equal are one entry of the tree. Units without parameters are left out.
    """
    owners = dict[int, tuple[FSDPModule, Tensor]]()
    _find_owners(model, None, owners)
    own = dict[FSDPModule, list[Tensor]]()
    for unit, parameter in owners.values():
        own.setdefault(unit, []).append(parameter)
    kinds = Counter(_kind(unit, parameters) for unit, parameters in own.items())
    groups = [
        UnitGroup(kind.module, count, kind.parameters, kind.parameters * kind.size, kind.dtype)
        for kind, count in kinds.items()
    ]
    return UnitTree(tuple(groups), _tree(model))


def _tree(model: nn.Module) -> str:
    tree = type(model).__name__
    # Own modules may describe themselves by code that fails, which must not end a run.
    with suppress(Exception):
        tree = repr(model)
    return tree if len(tree) <= _LONGEST_TREE else f"{tree[:_LONGEST_TREE].rpartition(chr(10))[0]}\n…"


def _find_owners(module: nn.Module, unit: FSDPModule | None, owners: dict[int, tuple[FSDPModule, Tensor]]) -> None:
    """Map each parameter to the innermost unit around it; a shared one to the first."""
    unit = module if isinstance(module, FSDPModule) else unit
    for parameter in module.parameters(recurse=False):
        if unit is not None:
            owners.setdefault(id(parameter), (unit, parameter))
    for child in module.children():
        _find_owners(child, unit, owners)


def _kind(unit: FSDPModule, parameters: list[Tensor]) -> _Kind:
    chosen = unit._get_fsdp_state()._mp_policy.param_dtype
    dtype = parameters[0].dtype if chosen is None else chosen
    name = type(unit).__name__.removeprefix(_PREFIX)
    known = _NAMES.get(dtype, str(dtype).removeprefix("torch."))
    return _Kind(name, sum(p.numel() for p in parameters), dtype.itemsize, known)
