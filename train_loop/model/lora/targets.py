"""The modules and parameters that get adapters (`model.lora`)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.lora.choices import choices
from train_loop.model.lora.reads import reads_weight
from train_loop.model.lora.routed import expert_matrices, expert_words, routed_remedy
from train_loop.model.lora.saved import Chosen
from train_loop.spec import ALL_LINEAR, LoraSpec

_ADAPTABLE = (nn.Linear, Conv1D)


class Targets(NamedTuple):
    """Parts of a model with adapters, and parts that are trained whole, by full names."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    saved: tuple[str, ...]


def find_targets(chosen: Chosen) -> Targets:
    """Return the targets of a spec in its model. Raises ModelError for names that match nothing."""
    return Targets(target_modules(chosen), target_parameters(chosen), chosen.saved)


def target_modules(chosen: Chosen) -> tuple[str, ...]:
    """Return the full names of the modules with adapters. Raises ModelError."""
    model, why = chosen.anatomy.model, _why_not(chosen.anatomy)
    inside = _inside(chosen)
    linear = {name: one for name, one in model.named_modules() if isinstance(one, _ADAPTABLE)}
    if chosen.lora.target_modules == ALL_LINEAR:
        found = [name for name, one in linear.items() if why(name, one) is None and inside(name)]
        if not found:
            raise ModelError(
                f"target_modules=all-linear matches no linear layer of {type(model).__name__} that can have adapters; "
                "name others, or set target_modules: [] with target_parameters"
            )
        return tuple(found)
    targets, words = dict[str, None](), expert_words(chosen.anatomy)
    for wanted in chosen.lora.target_modules:
        matched = {name: one for name, one in model.named_modules() if _is_named(name, wanted)}
        if not matched:
            known = [name for name, one in linear.items() if why(name, one) is None]
            is_of_experts = wanted.rpartition(".")[2] in words
            remedy = routed_remedy(chosen) if is_of_experts else choices(wanted, known)
            raise ModelError(f"target_modules {wanted} matches no module; {remedy}")
        for name, one in matched.items():
            if inside(name) and (reason := why(name, one)) is not None:
                raise ModelError(f"target_modules {wanted} matches {name}, {reason}")
            if (word := chosen.cut_word(name)) is not None:
                raise ModelError(
                    f"target_modules {wanted} matches {name}, and modules_to_save {word} the module around it by an "
                    "end inside of a name: peft would train it whole and adapt it; write the whole name"
                )
        if not (below := [name for name in matched if inside(name)]):
            raise ModelError(
                f"target_modules {wanted} matches no module of layers={_listed(chosen.lora)} outside of those that are "
                f"trained whole ({', '.join(chosen.saved) or 'none'}); change one of them"
            )
        targets |= dict.fromkeys(below)
    return tuple(targets)


def _why_not(anatomy: Anatomy) -> Callable[[str, nn.Module], str | None]:
    """Return a function of a module's name and the module, which returns why it cannot have adapters; None if it can.

    Modules of a mixture that is no linear layer hold its experts.
    """
    model, experts = anatomy.model, anatomy.experts
    routers = {part for one in (() if experts is None else experts.routers) for part in one.modules()}
    held = set(() if experts is None else experts.modules)
    names = dict[int, int]()
    for _, module in model.named_modules(remove_duplicate=False):
        names[id(module)] = names.get(id(module), 0) + 1
    tied = anatomy.is_tied and {anatomy.embeddings, anatomy.head}

    def why(name: str, module: nn.Module) -> str | None:
        if tied and module in tied:
            return (
                "whose weights embeddings and head share (tie_word_embeddings): an adapter would change one of both; "
                "name other modules"
            )
        if module in (anatomy.head, anatomy.embeddings):
            return "which can only be trained whole; name it in modules_to_save"
        if module in routers:
            return "a router of experts, which can only be trained whole; name it in modules_to_save"
        if module in held:
            leaves = [f"{name.rpartition('.')[2]}.{leaf}" for leaf, p in module.named_parameters() if p.ndim == 3]
            return f"which holds experts as tensors; name these in target_parameters: {', '.join(leaves)}"
        if not isinstance(module, _ADAPTABLE):
            return f"a {type(module).__name__}, and adapters are for linear layers; name those inside of it"
        if names[id(module)] > 1:
            return "which the model uses in several places; name other modules"
        if reads_weight(model, name):
            return (
                "whose weight the code of its model may use without a call of the module, so that an adapter would "
                "have no effect; name other modules"
            )
        return None

    return why


def target_parameters(chosen: Chosen) -> tuple[str, ...]:
    """Return the full names of the parameters with adapters. Raises ModelError."""
    model, inside = chosen.anatomy.model, _inside(chosen)
    matrices = expert_matrices(chosen.anatomy)
    targets = dict[str, None]()
    for wanted in chosen.lora.target_parameters:
        matched = [name for name, _ in model.named_parameters() if _is_named(name, wanted)]
        if not matched:
            raise ModelError(f"target_parameters {wanted} matches no parameter; {choices(wanted, matrices, parts=2)}")
        if strange := next((name for name in matched if name not in matrices), None):
            raise ModelError(
                f"target_parameters {wanted} matches {strange}, which is not a tensor with a matrix of each expert; "
                f"{choices(wanted, matrices, parts=2)}"
            )
        if not (below := [name for name in matched if inside(name)]):
            raise ModelError(
                f"target_parameters {wanted} matches no parameter of layers={_listed(chosen.lora)}; change one"
            )
        targets |= dict.fromkeys(below)
    return tuple(targets)


def chosen_layers(chosen: Chosen) -> tuple[nn.Module, ...] | None:
    """Return the layers with adapters; None for the whole model. Raises ModelError."""
    anatomy, lora = chosen.anatomy, chosen.lora
    if lora.layers is None:
        return None
    count = len(anatomy.layers)
    if not count:
        raise ModelError(f"layers={_listed(lora)}, and {type(anatomy.model).__name__} states no layers; remove layers")
    if outside := [number for number in lora.layers if number >= count]:
        raise ModelError(f"layers {outside[0]} is none of the {count} layers of the model; choose 0 to {count - 1}")
    return tuple(anatomy.layers[number] for number in lora.layers)


def _inside(chosen: Chosen) -> Callable[[str], bool]:
    """Return a function of a name: whether it is in the chosen layers, and in no module that is trained whole."""
    layers = chosen_layers(chosen)
    places = {module: name for name, module in chosen.anatomy.model.named_modules()}
    within = None if layers is None else tuple(f"{places[layer]}." for layer in layers)
    whole = tuple(f"{name}." for name in chosen.saved)
    return lambda name: (within is None or name.startswith(within)) and not f"{name}.".startswith(whole)


def _is_named(name: str, wanted: str) -> bool:
    """Return whether a full name is the wanted one, or ends with its parts: peft's rule."""
    return name == wanted or name.endswith(f".{wanted}")


def _listed(lora: LoraSpec) -> str:
    return "all" if lora.layers is None else ", ".join(map(str, lora.layers))
