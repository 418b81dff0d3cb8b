"""Selection of FSDP units. Every parameter belongs to the innermost unit that holds it."""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy, modules_of
from train_loop.model.precision import Precision, attends_in_fp32, find_precision
from train_loop.spec import JobSpec, StrategySpec, WrapPolicySpec

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called, so that FSDP2 could not gather them."""


def repeated_layers(anatomy: Anatomy, policy: WrapPolicySpec) -> list[nn.Module]:
    """Return the layers that the model states, or else the policy's, in module order.

    Raises ModelError if a model with attention has none; others may be one unit.
    """
    model = anatomy.model
    layers = list(anatomy.layers) or modules_of(model, policy.transformer_layer_cls_to_wrap)
    layers = layers or innermost(_large_layers(anatomy, policy))
    if not layers and anatomy.depth:
        raise ModelError(
            f"{type(model).__name__} does not say which modules are its layers; name their class in "
            f"strategy.wrap_policy.transformer_layer_cls_to_wrap, for example {', '.join(wrappable(model)[:3])}"
        )
    return layers


def find_units(anatomy: Anatomy, policy: WrapPolicySpec) -> list[list[nn.Module]]:
    """Return the units below the root, inner units before outer ones; a unit of several modules shares a gather.

    Raises ModelError for a class name or a size that matches nothing, and for a parameter that several units share.
    """
    check_names(anatomy, policy)
    # Children come after their parents in module order, and must be sharded before them. A large unit may contain the
    # embeddings.
    layers, experts = wrapped_layers(anatomy, policy), expert_units(anatomy, policy)
    inner = [[module] for module in experts if module not in layers]
    units = inner + _outer_units(anatomy, policy) + [[module] for module in reversed(layers)]
    if not units and policy.min_num_params is not None:
        raise ModelError(_too_large(anatomy, policy))
    check_shared(anatomy.model, units)
    return units


def check_selective(anatomy: Anatomy, spec: JobSpec) -> None:
    """Raise ModelError if `selective` recomputes layers with units inside, whose gathers torch takes for operations."""
    if spec.model.gradient_checkpointing != "selective":
        return
    strategy = spec.strategy
    layers = repeated_layers(anatomy, strategy.wrap_policy)
    inside = {module for layer in layers for module in layer.modules() if module is not layer}
    units = (one for one in wrapped_layers(anatomy, strategy.wrap_policy) if one in inside)
    causes = {
        "mixtures of experts": anatomy.experts is not None,
        f"norm_dtype={strategy.norm_dtype}": strategy.norm_dtype is not None,
        "strategy.precision": bool(strategy.precision),
        "a wrap_policy with units inside of layers": next(units, None) is not None,
    }
    if found := [cause for cause, is_so in causes.items() if is_so]:
        raise ModelError(
            f"gradient_checkpointing=selective is not supported with {found[0]}: it needs layers without units inside; "
            "choose full or {every: 2}"
        )


def expert_units(anatomy: Anatomy, policy: WrapPolicySpec) -> list[nn.Module]:
    """Return the experts that the policy makes units, in execution order. Raises ModelError for other names."""
    experts, name = anatomy.experts, type(anatomy.model).__name__
    if experts is None and policy.moe_experts:
        raise ModelError(f"moe_experts={', '.join(policy.moe_experts)}, but {name} has no experts; remove moe_experts")
    if experts is None:
        return []
    for one in policy.moe_experts:
        if not experts.named([one]):
            known = sorted({type(module).__name__ for module in experts.modules})
            raise ModelError(f"moe_experts={one} names no experts of {name}; choose {' or '.join(known)}")
    return experts.named(policy.moe_experts)


def check_shared(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> None:
    """Raise ModelError for a parameter in two units, or in a unit and the root; inner units come first."""
    owners: dict[int, tuple[int, str]] = {}
    names = {module: name for name, module in model.named_modules()}
    taken = dict[nn.Module, int]()
    for number, unit in enumerate([*units, [model]]):
        held = [module for one in unit for module in one.modules()]
        for module in held:
            if module in taken and set(units[taken[module]]).isdisjoint(held):
                _check_module(model, units, module)
        modules = [module for module in held if module not in taken]
        taken.update(dict.fromkeys(modules, number))
        for module in modules:
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{names[module]}.{leaf}"
                owner, first = owners.setdefault(id(parameter), (number, name))
                if owner != number:
                    raise ModelError(_shared(model, units, first, name))


def _check_module(model: nn.Module, units: Sequence[Sequence[nn.Module]], module: nn.Module) -> None:
    """Raise ModelError for a module with parameters that is a part of two units."""
    for parameter in module.parameters():
        named = model.named_parameters(remove_duplicate=False)
        one, other, *_ = [name for name, its in named if its is parameter]
        raise ModelError(_shared(model, units, one, other))


def _shared(model: nn.Module, units: Sequence[Sequence[nn.Module]], one: str, other: str) -> str:
    held = {id(p): type(module).__name__ for unit in units for module in unit for p in module.parameters()}
    shared = model.get_parameter(one)
    free = {
        type(module).__name__: None
        for unit in units
        for module in unit
        if id(shared) not in {id(p) for p in module.parameters()}
    }
    remedy = f"[{', '.join(free)}]" if free else "classes that do not hold it"
    return (
        f"{one} and {other} of {type(model).__name__} are one parameter, which the unit {held[id(shared)]} and another "
        f"part of the model would both shard; set strategy.wrap_policy.transformer_layer_cls_to_wrap: {remedy}"
    )


def wrapped_layers(anatomy: Anatomy, policy: WrapPolicySpec) -> list[nn.Module]:
    """Return the layers that become units, in execution order. Raises ModelError as `repeated_layers` does."""
    if policy.min_num_params is not None:
        return _large_layers(anatomy, policy)
    return modules_of(anatomy.model, policy.transformer_layer_cls_to_wrap) or repeated_layers(anatomy, policy)


def _large_layers(anatomy: Anatomy, policy: WrapPolicySpec) -> list[nn.Module]:
    """Return the modules that `min_num_params` makes units, without embeddings and head, in execution order."""
    return [one for one in large_modules(anatomy, policy) if one not in (anatomy.embeddings, anatomy.head)]


def large_modules(anatomy: Anatomy, policy: WrapPolicySpec) -> list[nn.Module]:
    """Return the modules with at least `min_num_params` parameters that no unit inside of them has, in module order.

    This is the rule of torch's `size_based_auto_wrap_policy`. A module that shares a parameter with the rest of the
    model is left out, because each parameter is in one unit.
    """
    least = policy.min_num_params
    if least is None:
        return []
    found, taken = list[nn.Module](), {id(p) for end in chosen_ends(anatomy, policy) for p in end.parameters()}
    # Children before their parents.
    for module in reversed(_separable(anatomy.model)):
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(own.values()) >= least:
            found.append(module)
            taken |= own.keys()
    return found[::-1]


def _separable(model: nn.Module) -> list[nn.Module]:
    """Return the modules that could be units: they are called, and share no parameter with the rest of the model."""
    names = _names_of_parameters(model)
    # It uses its children's parameters without calling them.
    hidden = {
        child for one in model.modules() if isinstance(one, nn.MultiheadAttention) for child in [*one.modules()][1:]
    }
    return [
        module
        for module in model.modules()
        if module is not model and module not in hidden and not isinstance(module, _CONTAINERS)
        if all(names[key] == count for key, count in _names_of_parameters(module).items())
    ]


def _names_of_parameters(module: nn.Module) -> Counter[int]:
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _too_large(anatomy: Anatomy, policy: WrapPolicySpec) -> str:
    ends = [anatomy.embeddings] if anatomy.is_tied and anatomy.embeddings is not None else []
    largest = max(map(_parameters, [*_separable(anatomy.model), *ends]), default=0)
    return (
        f"min_num_params={policy.min_num_params} is more than the parameters of any module of "
        f"{type(anatomy.model).__name__} that could be a unit; choose at most {largest}"
    )


def innermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that contain none of the others."""
    chosen = set(modules)
    return [module for module in modules if chosen.intersection(module.modules()) == {module}]


def check_names(anatomy: Anatomy, policy: WrapPolicySpec) -> None:
    """Raise ModelError for a class to wrap that matches no module, or that is not a layer's class."""
    model, ends = anatomy.model, {"wrap_embeddings": anatomy.embeddings, "wrap_lm_output": anatomy.head}
    for name in policy.transformer_layer_cls_to_wrap:
        for field, module in ends.items():
            if type(module).__name__ == name:
                # A module cannot be a unit twice, and tied weights must stay one parameter.
                raise ModelError(f"transformer_layer_cls_to_wrap={name} is not a layer; set {field}: true instead")
        if not modules_of(model, [name]):
            raise ModelError(
                f"transformer_layer_cls_to_wrap={name} matches no module of {type(model).__name__}; "
                f"choose among {', '.join(wrappable(model) or _with_parameters(model))}"
            )


def wrappable(model: nn.Module) -> list[str]:
    """Return the classes of modules that could be units: they have child modules and parameters."""
    found = {
        type(module).__name__: None
        for module in model.modules()
        if module is not model and not isinstance(module, nn.ModuleList) and any(module.children())
        if any(True for _ in module.parameters())
    }
    return list(found)


def _with_parameters(model: nn.Module) -> list[str]:
    held = (one for one in model.modules() if one is not model and any(True for _ in one.parameters()))
    return list(dict.fromkeys(type(one).__name__ for one in held))


def _outer_units(anatomy: Anatomy, policy: WrapPolicySpec) -> list[list[nn.Module]]:
    ends = chosen_ends(anatomy, policy)
    if anatomy.is_tied:
        return [ends] if ends else []
    large = large_modules(anatomy, policy)
    return [[end] for end in (anatomy.embeddings, anatomy.head) if end is not None and (end in ends or end in large)]


def are_outside_layers(strategy: StrategySpec) -> bool:
    """Return whether embeddings and head that are units come before and after all layers, and not inside of a unit."""
    return strategy.wrap_policy.min_num_params is None and not strategy.precision


def chosen_ends(anatomy: Anatomy, policy: WrapPolicySpec) -> list[nn.Module]:
    """Return the embeddings and the head, as far as the policy names them, or makes them a unit because they are tied.

    Tied embeddings must stay one parameter: they are one unit together, or stay with the root. The root also stays
    gathered from its first module to its last, so that they are a unit only on request.
    """
    chosen = [(anatomy.embeddings, policy.wrap_embeddings), (anatomy.head, policy.wrap_lm_output)]
    if not anatomy.is_tied:
        saves = _saves_memory(anatomy, policy)
        return [one for one, wrap in chosen if one is not None and (saves(one) if wrap is None else wrap)]
    ends, least = [module for module, _ in chosen if module is not None], policy.min_num_params
    is_large = least is not None and _parameters(ends[0]) >= least
    return ends if policy.wrap_embeddings or policy.wrap_lm_output or is_large else []


def _saves_memory(anatomy: Anatomy, policy: WrapPolicySpec) -> Callable[[nn.Module], bool]:
    """Return whether the peak of a step is lower if an end of the model is a unit.

    That of the plan without the model is `ModelShape.units`.
    """
    if policy.min_num_params is not None or anatomy.labels is not None or not anatomy.layers:
        return lambda _: False
    layer = max(map(_parameters, repeated_layers(anatomy, policy)))
    separable = set(_separable(anatomy.model))
    return lambda one: isinstance(one, nn.Embedding | nn.Linear) and one in separable and _parameters(one) >= layer


def join_units(anatomy: Anatomy, units: list[list[nn.Module]], precision: Precision) -> list[list[nn.Module]]:
    """Return units with those of modules with another dtype, inner units before outer ones.

    Tied embeddings and head are one unit. Raises ModelError for a parameter that two units share.
    """
    if not precision.units:
        return units
    taken = {module for unit in units for module in unit}
    ends = [one for one in (anatomy.embeddings, anatomy.head) if one is not None] if anatomy.is_tied else []
    more = [[one] for one in precision.units if one not in taken and one not in ends]
    if any(one in precision.units and one not in taken for one in ends):
        more.append(ends)
    order = {module: number for number, module in enumerate(anatomy.model.modules())}
    # Children come after their parents in module order.
    joined = sorted([*units, *more], key=lambda unit: max(order[one] for one in unit), reverse=True)
    check_shared(anatomy.model, joined)
    return joined


def check_precision(anatomy: Anatomy, spec: JobSpec) -> None:
    """Raise ModelError if a pattern matches nothing, or if its units do not fit the model or other settings."""
    strategy, kernel = spec.strategy, spec.model.attn_implementation
    if not strategy.precision:
        return
    found = find_precision(anatomy, strategy)
    join_units(anatomy, find_units(anatomy, strategy.wrap_policy), found)
    layers = repeated_layers(anatomy, strategy.wrap_policy)
    compiled = innermost(wrapped_layers(anatomy, strategy.wrap_policy)) or [anatomy.model]
    mlps = [one for layer in layers for one in layer.children() if type(one).__name__.endswith("MLP")]
    if spec.model.compile:
        _check_whole(anatomy, found, compiled, "model.compile translates", "breaks its graph")
    if strategy.apply_tiled_mlp:
        _check_whole(anatomy, found, mlps, "apply_tiled_mlp gathers", "would be gathered for each tile")
    if kernel.startswith("flash") and attends_in_fp32(anatomy.model, strategy):
        raise ModelError(
            f"attn_implementation={kernel} computes in bf16 or fp16, and precision gives attention fp32; choose sdpa, "
            "or name other modules"
        )


def _check_whole(anatomy: Anatomy, found: Precision, wholes: Sequence[nn.Module], setting: str, why: str) -> None:
    """Raise ModelError if a unit of another dtype is inside one of the modules that a setting needs whole."""
    names = {one: name for name, one in anatomy.model.named_modules()}
    inside = {one: whole for whole in wholes for one in whole.modules() if one is not whole}
    for unit in found.units:
        if (whole := inside.get(unit)) is not None:
            outer = names[whole] or "the model"
            raise ModelError(
                f"{setting} {outer} as a whole, and the unit {names[unit]} with another dtype inside of it {why}; name "
                f"{outer} in precision, or remove one of the two"
            )
