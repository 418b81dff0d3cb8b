"""Linear layers that compute in float8 (Micikevicius et al., 2022), by torchao: `strategy.float8`.

Weights stay in the master dtype between steps. Each product rounds its operands to float8, with one scale for a tensor
or for each of its rows.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train_loop.errors import ModelError, UserError
from train_loop.extras import cannot_import
from train_loop.model.families.anatomy import Anatomy, plain_linears
from train_loop.plan import Float8Linears
from train_loop.spec import JobSpec

_MULTIPLE = 16
"""Sizes of matrices that GPUs multiply in float8 are multiples of it."""
_OLDEST = (8, 9)
"""First compute capability with float8."""


def float8_linears(anatomy: Anatomy, layers: Sequence[nn.Module], spec: JobSpec) -> Float8Linears:
    """Return the linear modules in a model's layers that compute in float8, and those that keep their dtype, by name.

    Experts and routers are left out, and so are sizes that are no multiples of 16. Raises ModelError if none remains.
    """
    names = {one: name for name, one in anatomy.model.named_modules()}
    found, setting = plain_linears(anatomy, layers), f"float8={spec.strategy.float8}"
    kept = [one for one in found if one.in_features % _MULTIPLE or one.out_features % _MULTIPLE]
    if not found:
        raise ModelError(
            f"{setting} has no effect on {type(anatomy.model).__name__}, whose layers have no torch.nn.Linear outside "
            "of experts and routers; remove float8"
        )
    if len(kept) == len(found):
        raise ModelError(
            f"{setting} has no effect on {type(anatomy.model).__name__}: sizes in float8 are multiples of {_MULTIPLE}, "
            f"and no linear layer has them, for example {names[kept[0]]} with {kept[0].in_features} x "
            f"{kept[0].out_features}; remove float8"
        )
    left = set(kept)
    return Float8Linears(
        scaling=spec.strategy.float8 or "",
        names=tuple(names[one] for one in found if one not in left),
        values=sum(one.weight.numel() for one in found if one not in left),
        left_out=tuple(names[one] for one in kept),
    )


def convert_linears(
    anatomy: Anatomy, names: Iterable[str], spec: JobSpec, *, shards: int, device: torch.device
) -> None:
    """Replace linear modules by torchao's in place, with parameters of the same names.

    With scales of whole tensors, ranks gather those weights in float8 of which each has as many rows. On CPUs, products
    of rounded operands are computed in float32. Raises UserError without torchao, or on a GPU without float8.
    """
    setting = f"float8={spec.strategy.float8}"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _OLDEST:
        raise UserError(
            f"{setting} needs a GPU of compute capability {_OLDEST[0]}.{_OLDEST[1]} or later, and this one has "
            f"{found[0]}.{found[1]}; remove float8"
        )
    library = _torchao(setting)
    modules: list[Any] = [anatomy.model.get_submodule(name) for name in names]
    owners = Counter(id(p) for _, p in anatomy.model.named_parameters(remove_duplicate=False))
    gathered = {
        one
        for one in modules
        if spec.strategy.float8 == "tensorwise" and one.out_features % shards == 0 and owners[id(one.weight)] == 1
    }
    recipe = library.Float8LinearConfig.from_recipe_name(spec.strategy.float8)
    own = replace(recipe, emulate=device.type != "cuda", pad_inner_dim=_needs_padding(spec))
    for chosen, gathers in ((gathered, True), ({*modules} - gathered, False)):
        if chosen:
            config = replace(own, enable_fsdp_float8_all_gather=gathers)
            library.convert_to_float8_training(
                anatomy.model, module_filter_fn=lambda module, name, of=chosen: module in of, config=config
            )


def _torchao(setting: str) -> Any:
    """Return torchao's module for float8. Raises UserError if it cannot be imported."""
    try:
        # An optional dependency, whose import takes seconds.
        return import_module("torchao.float8")
    except ImportError as error:
        missing = cannot_import(setting, "torchao", error)
        raise UserError(f"{missing} on the workers, or remove float8") from error


def _needs_padding(spec: JobSpec) -> bool:
    """Return whether calls may have a number of tokens that GPUs cannot sum over in float8. Padding copies operands."""
    strategy = spec.strategy
    tokens = spec.sequences_per_device * spec.data.sequence_length // strategy.ulysses_size
    return tokens % (_MULTIPLE * (strategy.tiled_num_shards if strategy.apply_tiled_mlp else 1)) != 0


def update_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8, by one exchange. A collective call.

    Call it after the weights have changed. Without it, each gather computes the same scales by an exchange for each
    weight.
    """
    _torchao("float8=tensorwise").precompute_float8_dynamic_scale_for_fsdp(model)


def forget_scales(weights: Iterable[Tensor]) -> None:
    """Forget the scales of weights that have changed in another way than by the optimizer."""
    for weight in weights:
        own = weight._local_tensor if isinstance(weight, DTensor) else weight
        if hasattr(own, "_precomputed_scale"):
            own._precomputed_scale = None
