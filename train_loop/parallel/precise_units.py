"""FSDP units of modules with a dtype of their own, `strategy.precision`, beside the other units."""

from collections.abc import Sequence

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.precision import Precision, attends_in_fp32, find_precision
from train_loop.parallel.units import check_shared, find_units, innermost, repeated_layers, wrapped_layers
from train_loop.spec import JobSpec


def join_units(anatomy: Anatomy, units: list[list[nn.Module]], precision: Precision) -> list[list[nn.Module]]:
    """Return units with those of modules of their own dtype, inner units before outer ones.

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
    """Raise ModelError if a unit of its own dtype is inside one of the modules that a setting needs whole."""
    names = {one: name for name, one in anatomy.model.named_modules()}
    inside = {one: whole for whole in wholes for one in whole.modules() if one is not whole}
    for unit in found.units:
        if (whole := inside.get(unit)) is not None:
            outer = names[whole] or "the model"
            raise ModelError(
                f"{setting} {outer} as a whole, and the unit {names[unit]} with another dtype inside of it {why}; name "
                f"{outer} in precision, or remove one of the two"
            )
