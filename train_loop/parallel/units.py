"""Selection of FSDP units. Every parameter belongs to the innermost unit that holds it."""

from collections.abc import Iterable, Sequence

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.spec import WrapPolicySpec


def repeated_layers(anatomy: Anatomy, policy: WrapPolicySpec) -> list[nn.Module]:
    """Return the layers that the model states, or else the policy's, in module order.

    Raises ModelError if there are none.
    """
    model = anatomy.model
    layers = list(anatomy.layers) or modules_of(model, policy.transformer_layer_cls_to_wrap)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layer classes in _no_split_modules; name one in "
            f"strategy.wrap_policy.transformer_layer_cls_to_wrap, for example {', '.join(wrappable(model)[:3])}"
        )
    return layers


def find_units(anatomy: Anatomy, policy: WrapPolicySpec) -> list[list[nn.Module]]:
    """Return the units below the root, inner units before outer ones; a unit of several modules shares a gather.

    Raises ModelError for a class name that matches nothing, and for a parameter that several units share.
    """
    check_names(anatomy, policy)
    # Children come after their parents in module order, and must be sharded before them.
    units = [[module] for module in reversed(wrapped_layers(anatomy, policy))] + _outer_units(anatomy, policy)
    check_shared(anatomy.model, units)
    return units


def check_shared(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> None:
    """Raise ModelError for a parameter in two units, or in a unit and the root; inner units come first."""
    owners: dict[int, tuple[int, str]] = {}
    names = {module: name for name, module in model.named_modules()}
    taken = set[nn.Module]()
    for number, unit in enumerate([*units, [model]]):
        modules = [module for one in unit for module in one.modules() if module not in taken]
        taken.update(modules)
        for module in modules:
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{names[module]}.{leaf}"
                owner, first = owners.setdefault(id(parameter), (number, name))
                if owner != number:
                    raise ModelError(_shared(model, units, first, name))


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
    return modules_of(anatomy.model, policy.transformer_layer_cls_to_wrap) or repeated_layers(anatomy, policy)


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
                f"choose among {', '.join(wrappable(model))}"
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


def modules_of(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the modules below the root whose class has one of the names."""
    wanted = set(names)
    return [module for module in model.modules() if module is not model and type(module).__name__ in wanted]


def _outer_units(anatomy: Anatomy, policy: WrapPolicySpec) -> list[list[nn.Module]]:
    chosen = [(anatomy.embeddings, policy.wrap_embeddings), (anatomy.head, policy.wrap_lm_output)]
    if anatomy.is_tied:
        # Tied embeddings must stay one parameter: they are one unit together, or stay with the root.
        both = [module for module, _ in chosen if module is not None]
        return [both] if policy.wrap_embeddings or policy.wrap_lm_output else []
    return [[module] for module, wrap in chosen if wrap and module is not None]
