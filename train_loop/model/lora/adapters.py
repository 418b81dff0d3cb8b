"""Low-rank adapters of a model (`model.lora`), by peft: the only module that imports it.

Adapters are injected into a model on meta, before it is sharded. peft's layer takes the place of each target, which it
calls: `q_proj` gets `q_proj.base_layer.weight`, `q_proj.lora_A.default.weight` [r, in] and
`q_proj.lora_B.default.weight` [out, r]. The tensors of all experts of a layer have `experts.lora_A.default.weight`
[experts x r, in] and `experts.lora_B.default.weight` [out, r x experts], as peft's `ParamWrapper` defines them; the
wrapper of a second tensor is around that of the first. Adapters and modules to save are fp32, whatever the model is.
"""

import copy
import hashlib
import math
import warnings
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train_loop.errors import ModelError
from train_loop.extras import cannot_import
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.family import SettingCheck
from train_loop.model.lora.names import RENAMED, by_plain_name, has_adapters
from train_loop.model.lora.product import OneProduct
from train_loop.model.lora.routed import routed_warning
from train_loop.model.lora.saved import Chosen, choose
from train_loop.model.lora.targets import Targets, chosen_layers, find_targets, target_modules, target_parameters
from train_loop.model.parts import own_parts
from train_loop.spec import JobSpec, LoraSpec, ModelSpec

ADAPTER = "default"
"""Name of the adapters in peft's layers."""
MAGNITUDE = "lora_magnitude_vector"
"""Attribute of peft's layers with the magnitudes of DoRA (Liu et al., 2024)."""


def lora_checks(anatomy: Anatomy, spec: JobSpec) -> tuple[SettingCheck, ...]:
    """Return a check for each setting of adapters that a model, before it has them, may not support."""
    if spec.model.lora is None:
        return ()
    chosen = choose(anatomy, spec.model)
    needed = (
        SettingCheck("/model/lora", _peft),
        SettingCheck("/model/lora/layers", lambda: chosen_layers(chosen)),
        SettingCheck("/model/lora/modules_to_save", lambda: chosen.saved),
    )
    # The others need these, and would repeat their faults.
    return tuple(one for one in needed if not _holds(one)) or (
        SettingCheck("/model/lora/target_parameters", lambda: target_parameters(chosen)),
        SettingCheck("/model/lora/target_modules", lambda: target_modules(chosen)),
        SettingCheck("/model/router_bias_update", lambda: _check_balance(chosen)),
    )


def lora_notes(anatomy: Anatomy, spec: ModelSpec) -> tuple[str, ...]:
    """Return warnings about the adapters of a model that does not have them yet. Raises ModelError as `lora_checks`."""
    if spec.lora is None:
        return ()
    chosen = choose(anatomy, spec)
    return tuple(filter(None, [routed_warning(chosen, target_modules(chosen))]))


def _holds(one: SettingCheck) -> bool:
    try:
        one.check()
    except ModelError:
        return False
    return True


def inject_adapters(anatomy: Anatomy, spec: ModelSpec) -> None:
    """Give a model on meta its adapters, in place, and freeze all but these and the modules to save.

    Raises ModelError as `lora_checks` do.
    """
    model, chosen, peft = anatomy.model, choose(anatomy, spec), _peft()
    targets = find_targets(chosen)
    before = {id(module): name for name, module in model.named_modules()}
    # peft would take the names of some layers for those of experts in older versions of transformers, if it saw the
    # config of the model.
    around = nn.Module()
    around.model = model
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Conv1D
        peft.inject_adapter_in_model(peft_config(chosen.lora, targets, prefix="model."), around, ADAPTER)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.layer.Linear) and not module.lora_variant:
            module.lora_variant[ADAPTER] = OneProduct()
    renamed = {
        name: before[id(module)] for name, module in model.named_modules() if before.get(id(module), name) != name
    }
    setattr(model, RENAMED, renamed)
    for name in targets.saved:
        for parameter in model.get_submodule(name).parameters():
            parameter.requires_grad_()
    for parameter in trained_parameters(model).values():
        # FSDP2 needs one dtype of all that a unit trains.
        parameter.data = parameter.data.float()


def peft_config(lora: LoraSpec, targets: Targets, *, prefix: str = "") -> Any:
    """Return peft's config of adapters, with the full names of targets after a prefix."""
    return _peft().LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[f"{prefix}{name}" for name in targets.modules],
        target_parameters=[f"{prefix}{name}" for name in targets.parameters] or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=True if lora.init == "kaiming" else lora.init,
    )


def check_peft_reads(config: Any, model: nn.Module) -> None:
    """Raise ModelError if peft would read the targets of a config as other modules of a model.

    peft takes some names of dense layers for those of experts in older versions of transformers.
    """
    _peft()
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers  # noqa: PLC0415

    read = copy.deepcopy(config)
    convert_peft_config_for_transformers(read, model, None)
    if lost := sorted({*config.target_modules} - {*read.target_modules}):
        raise ModelError(
            f"peft takes {', '.join(lost[:3])} of {type(model).__name__} for experts; export with form merged, or "
            "train adapters on other modules"
        )


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name: those of adapters and of modules to save."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def without_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model that belong to no adapter, by the names that they have without adapters."""
    return by_plain_name(model, ((name, p) for name, p in model.named_parameters() if not _is_adapter(name)))


def _is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    *_, kind, adapter, leaf = ("", "", *name.split("."))
    return adapter == ADAPTER and leaf == "weight" and kind in ("lora_A", "lora_B", MAGNITUDE)


def shared_plan(model: nn.Module, plan: Mapping[str, str], *, rows: Container[str]) -> dict[str, str]:
    """Return a plan of how ranks share modules, for a model whose modules may have adapters.

    Of a target whose outputs ranks share, they share those of B, and of one whose inputs they share, those of A; each
    rank has the other matrix whole. `rows` are the styles of shared outputs. Parameters come before their module.
    """
    shared, modules = dict[str, str](), dict(model.named_modules())
    for name, style in plan.items():
        if not hasattr(modules.get(name), "lora_A"):
            shared[name] = style
            continue
        for part in ("base_layer", f"{'lora_B' if style in rows else 'lora_A'}.{ADAPTER}"):
            leaves = [f".{leaf}" for leaf, _ in modules[f"{name}.{part}"].named_parameters(recurse=False)]
            shared |= {f"{name}.{part}{leaf}": style for leaf in (*leaves, "")}
    return shared


def draw_adapters(model: nn.Module, lora: LoraSpec, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Initialise the adapters of a model with its other weights, sharded or not: A by peft's rule, B with zeros.

    Each whole A comes from (seed, name), and a rank keeps its part, so that the values do not depend on the mesh.
    Magnitudes are computed as by the model, in a dtype on a device: the first step is that of the model without
    adapters. A collective call with `use_dora`.
    """
    for name, parameter in model.named_parameters():
        if not _is_adapter(name):
            continue
        kind = name.split(".")[-3]
        value = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if kind == "lora_A":
            _draw(value, lora, seed=f"{seed}/{name}")
        elif kind == MAGNITUDE:
            layer: Any = model.get_submodule(name.partition(f".{MAGNITUDE}.")[0])
            value = _magnitudes(layer, dtype, device).to(value)
        with torch.no_grad():
            for own, box in own_parts(parameter):
                own.copy_(value[box])


def _magnitudes(layer: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the norm of each output's weights, as peft's layer computes it from gathered ones."""
    weight: Tensor = layer.base_layer.weight.detach()
    weight = (weight.full_tensor() if isinstance(weight, DTensor) else weight).to(device, dtype)
    norms: Tensor = torch.linalg.norm(weight.T if layer.fan_in_fan_out else weight, dim=1)
    return norms


def _draw(value: Tensor, lora: LoraSpec, *, seed: str) -> None:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(number)
    if lora.init == "gaussian":
        nn.init.normal_(value, std=1 / lora.r, generator=generator)
    else:
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)


def leave_out_parameters(model: nn.Module) -> None:
    """Let a copy on meta leave out adapters of parameters: peft adds them under autocast, which meta lacks."""
    if has_adapters(model):
        wrapper = _peft().tuners.lora.layer.ParamWrapper
        for module in model.modules():
            if isinstance(module, wrapper):
                module.enable_adapters(enabled=False)


def _peft() -> Any:
    """Return the package. Raises ModelError if it is not installed."""
    try:
        # The only import of this package, which takes seconds.
        import peft  # noqa: PLC0415
    except ImportError as error:
        missing = cannot_import("model.lora", "peft", error)
        raise ModelError(f"{missing} on service and workers, or remove lora") from error
    return peft


def _check_balance(chosen: Chosen) -> None:
    model, experts, rate = chosen.anatomy.model, chosen.anatomy.experts, chosen.spec.router_bias_update
    if experts is None or rate is None:
        return
    whole = {part for name in chosen.saved for part in model.get_submodule(name).modules()}
    if not any(router in whole for router in experts.routers):
        raise ModelError(
            f"router_bias_update={rate} has no effect, because model.lora freezes each router of "
            f"{type(model).__name__}; remove router_bias_update, or name routers in modules_to_save"
        )
