"""The part of a model that one of the ranks which share its layers has, for its memory plan."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.experts import route_on_meta
from train_loop.model.families.causal.parallel.sequence import SplitStates
from train_loop.model.families.causal.parallel.tensor import (
    OWN_ROWS,
    SPLIT_COLUMNS,
    SPLIT_ROWS,
    expanded_plan,
    few_keys,
    repeat_keys,
)
from train_loop.model.families.causal.parallel.token_parts import CountedParts
from train_loop.model.families.family import AttentionUse

_CUT = {"colwise": 0, OWN_ROWS: 0, "embedding_rowwise": 0, "rowwise": 1}
"""The dimension of a parameter of which a rank needs only a part, by style."""


def cut_layers(model: Any, attention: Mapping[str, AttentionUse], size: int, *, parts: int = 1) -> None:
    """Cut a model on the meta device in place to the largest part that one of `size` ranks has.

    Its ranks exchange nothing: outputs that they would gather are whole. Experts take tokens in any order. Between
    projections a rank has one of `parts` of the tokens.
    """
    route_on_meta(model)
    plan = expanded_plan(model, attention, size) if size > 1 else {}
    few = few_keys(plan, attention)
    for name, parameter in dict(model.named_parameters()).items():
        holder, _, leaf = name.rpartition(".")
        module, ranks, style = model.get_submodule(holder), few.get(holder, size), plan.get(name)
        dim = _CUT.get(style or "", parameter.ndim)
        if dim < parameter.ndim:
            cut = parameter.narrow(dim, 0, -(-parameter.shape[dim] // ranks))
            module._parameters[leaf] = nn.Parameter(cut, parameter.requires_grad)
        if style == "embedding_rowwise":
            module.padding_idx = None  # torch looks for it among the rows
    repeat_keys(model, attention, size if few else 1)
    if parts > 1:
        SplitStates(model, plan, attention, CountedParts(parts))


def held_by_rank(anatomy: Anatomy, attention: Mapping[str, AttentionUse], size: int) -> dict[int, int]:
    """Return the number of values of each parameter that one of `size` ranks has, by id; empty if it is not known.

    Ranks share experts by another plan.
    """
    if size == 1 or anatomy.experts is not None:
        return {}
    model = anatomy.model
    plan = expanded_plan(model, attention, size)

    def is_split(name: str, parameter: nn.Parameter) -> bool:
        return plan.get(name) in SPLIT_ROWS or (plan.get(name) in SPLIT_COLUMNS and parameter.ndim > 1)

    return {id(p): -(-p.numel() // size) if is_split(name, p) else p.numel() for name, p in model.named_parameters()}
