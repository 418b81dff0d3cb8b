"""The parts of a model that `model.lora` names: targets of adapters, and modules that are trained whole."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.spec import ALL_LINEAR, LoraSpec

_ADAPTABLE = (nn.Linear, Conv1D)


class Targets(NamedTuple):
    """Parts of a model with adapters, and parts that are trained whole, by full names."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    saved: tuple[str, ...]


def find_targets(anatomy: Anatomy, lora: LoraSpec) -> Targets:
    """Return the targets of a spec in a model without adapters. Raises ModelError for names that match nothing."""
    saved = saved_modules(anatomy, lora)
    return Targets(target_modules(anatomy, lora), target_parameters(anatomy, lora), saved)


def target_modules(anatomy: Anatomy, lora: LoraSpec) -> tuple[str, ...]:
    """Return the full names of the modules with adapters. Raises ModelError."""
    model, why = anatomy.model, _why_not(anatomy)
    inside = _inside(anatomy, lora)
    linear = {name: one for name, one in model.named_modules() if isinstance(one, _ADAPTABLE)}
    if lora.target_modules == ALL_LINEAR:
        found = [name for name, one in linear.items() if why(name, one) is None and inside(name)]
        if not found:
            raise ModelError(
                f"target_modules=all-linear matches no linear layer of {type(model).__name__} that can have adapters; "
                "name others, or set target_modules: [] with target_parameters"
            )
        return tuple(found)
    chosen = dict[str, None]()
    for wanted in lora.target_modules:
        matched = {name: one for name, one in model.named_modules() if _is_named(name, wanted)}
        if not matched:
            known = [name for name, one in linear.items() if why(name, one) is None]
            raise ModelError(f"target_modules {wanted} matches no module; {_choices(wanted, known)}")
        for name, one in matched.items():
            if (reason := why(name, one)) is not None:
                raise ModelError(f"target_modules {wanted} matches {name}, {reason}")
        if not (below := [name for name in matched if inside(name)]):
            raise ModelError(
                f"target_modules {wanted} matches no module of layers={_listed(lora)} outside of modules_to_save; "
                "change one of them"
            )
        chosen |= dict.fromkeys(below)
    return tuple(chosen)


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
        if _is_read(model, name):
            return (
                "whose weight the code of its model may use without a call of the module, so that an adapter would "
                "have no effect; name other modules"
            )
        return None

    return why


def _is_read(model: nn.Module, name: str) -> bool:
    """Return whether the code around a module reads its weight, as fused kernels of state-space models do."""
    holder, _, leaf = name.rpartition(".")
    kind: Any = type(model.get_submodule(holder))
    code = _code(kind)
    return re.search(rf"\bself\.{re.escape(leaf)}\.weight\b(?!\.(dtype|device|shape))", code) is not None


@cache
def _code(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def target_parameters(anatomy: Anatomy, lora: LoraSpec) -> tuple[str, ...]:
    """Return the full names of the parameters with adapters. Raises ModelError."""
    model, experts = anatomy.model, anatomy.experts
    inside = _inside(anatomy, lora)
    held = [] if experts is None else [*experts.modules]
    places = {module: name for name, module in model.named_modules()}
    known = {f"{places[one]}.{leaf}": p for one in held for leaf, p in one.named_parameters(recurse=False)}
    matrices = [name for name, p in known.items() if p.ndim == 3]
    chosen = dict[str, None]()
    for wanted in lora.target_parameters:
        matched = [name for name, _ in model.named_parameters() if _is_named(name, wanted)]
        if not matched:
            raise ModelError(f"target_parameters {wanted} matches no parameter; {_choices(wanted, matrices, parts=2)}")
        if strange := next((name for name in matched if name not in matrices), None):
            raise ModelError(
                f"target_parameters {wanted} matches {strange}, which is not a tensor with a matrix of each expert; "
                f"{_choices(wanted, matrices, parts=2)}"
            )
        if not (below := [name for name in matched if inside(name)]):
            raise ModelError(f"target_parameters {wanted} matches no parameter of layers={_listed(lora)}; change one")
        chosen |= dict.fromkeys(below)
    return tuple(chosen)


def saved_modules(anatomy: Anatomy, lora: LoraSpec) -> tuple[str, ...]:
    """Return the full names of the modules that are trained whole; a head of labels always is. Raises ModelError."""
    model, chosen = anatomy.model, dict[str, None]()
    shared = _shared(model)
    named = {name: one for name, one in model.named_modules() if any(True for _ in one.parameters())}
    for wanted in lora.modules_to_save:
        matched = [name for name in named if _is_named(name, wanted)]
        if not matched:
            raise ModelError(f"modules_to_save {wanted} matches no module with parameters; {_choices(wanted, named)}")
        for name in matched:
            if any(id(p) in shared for p in named[name].parameters()):
                raise ModelError(
                    f"modules_to_save {wanted} matches {name}, whose weights another module shares "
                    "(tie_word_embeddings); peft would train one of both; name other modules"
                )
        chosen |= dict.fromkeys(matched)
    if anatomy.labels and anatomy.head is not None:
        chosen |= {name: None for name, one in named.items() if one is anatomy.head}
    return tuple(chosen)


def _shared(model: nn.Module) -> set[int]:
    seen, found = set[int](), set[int]()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (found if id(parameter) in seen else seen).add(id(parameter))
    return found


def chosen_layers(anatomy: Anatomy, lora: LoraSpec) -> tuple[nn.Module, ...] | None:
    """Return the layers with adapters; None for the whole model. Raises ModelError."""
    if lora.layers is None:
        return None
    count = len(anatomy.layers)
    if not count:
        raise ModelError(f"layers={_listed(lora)}, and {type(anatomy.model).__name__} states no layers; remove layers")
    if outside := [number for number in lora.layers if number >= count]:
        raise ModelError(f"layers {outside[0]} is none of the {count} layers of the model; choose 0 to {count - 1}")
    return tuple(anatomy.layers[number] for number in lora.layers)


def _inside(anatomy: Anatomy, lora: LoraSpec) -> Callable[[str], bool]:
    """Return a function of a name: whether it is in the chosen layers, and in no module that is trained whole."""
    layers = chosen_layers(anatomy, lora)
    places = {module: name for name, module in anatomy.model.named_modules()}
    within = None if layers is None else tuple(f"{places[layer]}." for layer in layers)
    whole = tuple(f"{name}." for name in saved_modules(anatomy, lora))
    return lambda name: (within is None or name.startswith(within)) and not f"{name}.".startswith(whole)


def _is_named(name: str, wanted: str) -> bool:
    """Return whether a full name is the wanted one, or ends with its parts: peft's rule."""
    return name == wanted or name.endswith(f".{wanted}")


def _listed(lora: LoraSpec) -> str:
    return "all" if lora.layers is None else ", ".join(map(str, lora.layers))


def _choices(wanted: str, names: Iterable[str], *, parts: int = 1) -> str:
    """Return names that would match, as a phrase, by their last parts: those similar to a wanted one first."""
    known = list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))
    if not known:
        return "the model has none; remove it"
    near = difflib.get_close_matches(wanted, known, n=3)
    return f"choose for example {', '.join(dict.fromkeys([*near, *known[:6]]))}"
