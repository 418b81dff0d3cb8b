"""Sizes of FSDP units and of their activations, for the memory plan."""

from collections.abc import Container, Iterator
from itertools import pairwise

from torch import nn

from train_loop.model.families.anatomy import Anatomy
from train_loop.model.precision import Precision, find_precision
from train_loop.model.quantize import quantized_layers
from train_loop.parallel.units import are_outside_layers, find_units, join_units, repeated_layers
from train_loop.plan import DTYPE_BYTES, ComputeBytes, UnitSizes
from train_loop.spec import StrategySpec


def unit_sizes(anatomy: Anatomy, strategy: StrategySpec) -> UnitSizes:
    """Return the sizes of the units."""
    policy, quantized = strategy.wrap_policy, quantized_layers(anatomy.model).values()
    # Codes and scales are gathered as they are stored.
    stored = {p: p.numel() * p.element_size() for layer in quantized for p in (layer.codes, layer.scales)}
    precision = find_precision(anatomy, strategy)
    own, shared, taken = dict[nn.Module, float](), 0.0, set[int]()
    for unit in join_units(anatomy, find_units(anatomy, policy), precision):
        weight = DTYPE_BYTES[precision.dtypes[unit[0]]] / DTYPE_BYTES[strategy.param_dtype]
        parameters = {id(p): p for module in unit for p in module.parameters() if id(p) not in taken}
        taken |= parameters.keys()
        compute = DTYPE_BYTES[strategy.param_dtype]
        size = sum(stored[p] / compute if p in stored else weight * p.numel() for p in parameters.values())
        # Tied embeddings, a unit of two modules, stay gathered between both: they count as a part of the root.
        if len(unit) == 1:
            own[unit[0]] = size
        else:
            shared += size
    inside = {unit: set(unit.modules()) for unit in own}
    gathered = {unit: sum(own[outer] for outer in own if unit in inside[outer]) for unit in own}
    # Backward gathers ahead the unit that forward has left before.
    left = list(_in_order_of_return(anatomy.model, own))
    ahead = [gathered[unit] + own[before] for before, unit in pairwise(left)]

    def size_of(end: nn.Module | None) -> int:
        return round(own[end]) if end in ends else 0

    ends = [one for one in (anatomy.embeddings, anatomy.head) if one in own and are_outside_layers(strategy)]
    rest = sum(p.numel() for p in anatomy.model.parameters() if id(p) not in taken)
    return UnitSizes(
        root=round(rest + shared),
        all=round(sum(own.values())),
        largest=round(max(own.values(), default=0)),
        gathered=round(max((size for unit, size in gathered.items() if unit not in ends), default=0)),
        ahead=round(max([*ahead, *gathered.values()], default=0)),
        has_head=anatomy.head in own,
        embeddings=size_of(anatomy.embeddings),
        head=size_of(anatomy.head),
    )


def _in_order_of_return(module: nn.Module, units: Container[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _in_order_of_return(child, units)
    if module in units:
        yield module


def compute_bytes(anatomy: Anatomy, strategy: StrategySpec) -> ComputeBytes | None:
    """Return the bytes of what modules compute with `precision`; None without it."""
    if not strategy.precision:
        return None
    precision = find_precision(anatomy, strategy)
    layers = [_widest(layer, precision) for layer in repeated_layers(anatomy, strategy.wrap_policy)]
    plain = DTYPE_BYTES[strategy.param_dtype]
    return ComputeBytes(
        layer=max(layers, default=plain),
        layers=sum(layers) / len(layers) if layers else plain,
        head=plain if anatomy.head is None else DTYPE_BYTES[precision.dtypes[anatomy.head]],
    )


def _widest(layer: nn.Module, precision: Precision) -> int:
    return max(DTYPE_BYTES[precision.dtypes[one]] for one in layer.modules())
