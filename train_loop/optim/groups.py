"""Parameter groups: learning rate, decay and betas of each trained parameter, by its name, its layer and its role."""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.match import match_parameters
from train_loop.model.roles import Role, roles_of
from train_loop.spec import OptimizerSpec, ParameterGroupSpec

_AFTER_LAYERS = 0
"""Distance of the head, and of what else follows the layers."""


@dataclass(frozen=True)
class ParameterGroup:
    """Trained parameters with the same settings."""

    name: str | None
    """Patterns and layer by which they were chosen; None if the spec has neither groups nor layer_decay."""
    parameters: tuple[nn.Parameter, ...]
    lr: float
    weight_decay: float
    betas: tuple[float, float] | None
    """Decay rates of both moments; None for those of the optimizer."""

    def only(self, members: Container[int]) -> "ParameterGroup":
        """Return the group with some of its parameters, given by id."""
        return replace(self, parameters=tuple(p for p in self.parameters if id(p) in members))


class _Key(NamedTuple):
    """The choice of a parameter's settings; keys sort as groups are reported."""

    number: int
    """Number of the spec's group, -1 for other parameters."""
    distance: int
    """Layers from the head, 0 for the head; always 0 without layer_decay."""
    is_vector: bool
    """True for norms, biases and other vectors, which do not decay by default."""


def parameter_groups(anatomy: Anatomy, training: OptimizerSpec) -> list[ParameterGroup]:
    """Return the groups of all trained parameters: those of no group of the spec first, then by layer from the head.

    Vectors do not decay by default. Raises ModelError for patterns that match nothing, or nothing that is trained, and
    for layer_decay of a model without layers.
    """
    numbers, distances = _numbers(anatomy.model, training.groups), _distances(anatomy, training)
    roles = roles_of(anatomy)
    found = dict[_Key, list[nn.Parameter]]()
    for p in (p for p in anatomy.model.parameters() if p.requires_grad):
        number = numbers.get(id(p), -1)
        decays_all = number >= 0 and training.groups[number].weight_decay is not None
        is_vector = not decays_all and roles[id(p)] == Role.VECTOR
        found.setdefault(_Key(number, distances.get(id(p), _AFTER_LAYERS), is_vector), []).append(p)
    layers = len(anatomy.layers)
    return [_group(key, found[key], training, layers) for key in sorted(found)]


def _group(key: _Key, parameters: Iterable[nn.Parameter], training: OptimizerSpec, layers: int) -> ParameterGroup:
    own = training.groups[key.number] if key.number >= 0 else None
    lr = training.learning_rate
    if training.layer_decay is not None:
        lr *= training.layer_decay**key.distance
    decay = 0.0 if key.is_vector else training.weight_decay
    if own is not None:
        lr = own.learning_rate if own.learning_rate is not None else lr * (own.lr_scale or 1.0)
        decay = decay if own.weight_decay is None else own.weight_decay
    name = ", ".join(_names(key, own, training, layers)) if training.groups or training.layer_decay else None
    return ParameterGroup(name, tuple(parameters), lr, decay, None if own is None else own.betas)


def _names(key: _Key, own: ParameterGroupSpec | None, training: OptimizerSpec, layers: int) -> Iterator[str]:
    if own is not None:
        yield from own.params
    if training.layer_decay is None:
        yield from () if own is not None else ("others",)
    elif key.distance == _AFTER_LAYERS:
        yield "after layers"
    else:
        yield "before layers" if key.distance > layers else f"layer {layers - key.distance}"


def _numbers(model: nn.Module, groups: tuple[ParameterGroupSpec, ...]) -> Mapping[int, int]:
    """Return the number of the last group that matches each parameter, by id. Raises ModelError."""
    found, trained = dict[int, int](), {id(p) for p in model.parameters() if p.requires_grad}
    for number, group in enumerate(groups):
        for pattern in group.params:
            matched = match_parameters(model, pattern, setting=f"groups.{number}.params")
            if not matched & trained:
                raise ModelError(f"groups.{number}.params {pattern} matches frozen parameters only; remove it")
            found |= dict.fromkeys(matched, number)
    for number in set(range(len(groups))) - {found[one] for one in trained if one in found}:
        raise ModelError(
            f"groups.{number} has no parameter, because later groups match all of them; move it to the end, or "
            "remove it"
        )
    return found


def _distances(anatomy: Anatomy, training: OptimizerSpec) -> Mapping[int, int]:
    """Return the exponent of layer_decay of each parameter before or in the layers, by id; empty without layer_decay.

    The rule of BEiT and timm: layer i of L has L - i, and what the model lists before its layers L + 1.
    """
    if training.layer_decay is None:
        return {}
    count, found = len(anatomy.layers), dict[int, int]()
    if not count:
        raise ModelError(
            f"layer_decay needs layers, and {type(anatomy.model).__name__} states none; remove it, or name their "
            "classes in _no_split_modules of your model"
        )
    for place, layer in enumerate(anatomy.layers):
        for p in layer.parameters():
            found.setdefault(id(p), count - place)
    ids = [id(p) for p in anatomy.model.parameters()]
    first = next(place for place, one in enumerate(ids) if one in found)
    return found | dict.fromkeys(ids[:first], count + 1)
