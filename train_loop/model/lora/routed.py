"""Adapters of the experts of a mixture, which are tensors of all experts and not modules."""

from collections.abc import Sequence

from train_loop.model.families.anatomy import Anatomy
from train_loop.model.lora.saved import Chosen


def expert_matrices(anatomy: Anatomy) -> list[str]:
    """Return the full names of the tensors with a matrix of each expert."""
    if anatomy.experts is None:
        return []
    matrices = anatomy.experts.matrices
    return [name for name, parameter in anatomy.model.named_parameters() if id(parameter) in matrices]


def expert_words(anatomy: Anatomy) -> frozenset[str]:
    """Return the names that the linear layers of an expert have in folders and in the model, such as gate_proj."""
    model, matrices = anatomy.model, expert_matrices(anatomy)
    splits = anatomy.family.splits(model, {name: tuple(model.get_parameter(name).shape) for name in matrices})
    stored = [name for split in splits.values() for name in split.shapes]
    return frozenset(name.removesuffix(".weight").rpartition(".")[2] for name in (*matrices, *stored))


def routed_remedy(chosen: Chosen) -> str:
    """Return the setting that gives routed experts adapters, for a message."""
    names = dict.fromkeys(".".join(name.split(".")[-2:]) for name in expert_matrices(chosen.anatomy))
    return f"experts are tensors: to adapt them, set target_parameters: [{', '.join(names)}]"


def routed_warning(chosen: Chosen, modules: Sequence[str]) -> str | None:
    """Return a warning if modules with adapters have names of experts and no routed expert has adapters; else None."""
    experts, words = chosen.anatomy.experts, expert_words(chosen.anatomy)
    reached = [name for name in modules if name.rpartition(".")[2] in words]
    if experts is None or not reached or chosen.lora.target_parameters:
        return None
    return (
        f"model.lora adapts {reached[0]} and {len(reached) - 1} others, and none of the {experts.number} routed "
        f"experts of a layer; {routed_remedy(chosen)}"
    )
