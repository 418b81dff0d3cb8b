"""Experts and routers of transformers' mixtures of experts."""

import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Experts
from train_loop.model.families.causal.build import Config, Model, config_of, embeddings_of
from train_loop.model.families.causal.config import SOURCE
from train_loop.model.families.causal.embeddings import embedding_of
from train_loop.model.families.causal.heads import has_labels
from train_loop.model.families.causal.parallel.expert import check_expert_plan
from train_loop.model.families.family import SettingCheck, faults_without_experts, rejecting
from train_loop.spec import AUTO, JobSpec

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
"""Fields with the number of experts that a token uses."""
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Names of numbers that balance experts."""
_OLDEST = (8, 0)
"""First compute capability on which grouped matrix products run."""
_ALIGNED = 16
"""Bytes of which grouped matrix products need a multiple in each row."""
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables with the numbers of kernels that oneDNN and torch's layer above it keep on CPUs."""
_KERNELS = "64"
"""Such a number: they build a kernel for each number of tokens of an expert, and 1024 of them need a gigabyte."""
_LACKS = "is for families whose code has an auxiliary loss, and that of {} has none"


def experts_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules that hold experts, each all those of a layer as one tensor per projection."""
    return tuple(
        module
        for name, module in model.named_modules()
        # Every token uses shared experts.
        if type(module).__name__.endswith("Experts") and "shared" not in name.rpartition(".")[2]
    )


def check_no_experts(model: Model, *, another: str) -> None:
    """Raise ModelError for a mixture of experts; `another` names models without."""
    names = {type(module).__name__ for module in model.modules()}
    experts = sorted(n for n in names if "Expert" in n) or sorted(n for n in names if n.endswith("MoE"))
    if experts:
        raise ModelError(
            f"not supported yet: mixture of experts ({', '.join(experts)} in {type(model).__name__}); choose {another}"
        )


def check_fused(model: Model) -> None:
    """Raise ModelError for experts that do not have the interface of transformers' fused ones."""
    experts = experts_of(model)
    if not experts or not all(hasattr(one, "_apply_gate") for one in experts):
        check_no_experts(model, another="another mixture, for example qwen3_moe")


def anatomy_of_experts(model: Model, config: Config) -> Experts | None:
    """Return a model's experts; None if it is dense."""
    modules = experts_of(model)
    if not modules:
        return None
    number, chosen = len(next(p for p in modules[0].parameters() if p.ndim > 1)), _chosen(config)
    if not 0 < chosen <= number:
        raise ModelError(
            f"{type(model).__name__} has {number} experts in each layer, of which a token uses {chosen} by its config; "
            f"choose 1 to {number}"
        )
    routers = _routers_of(model)
    if len(routers) != len(modules):
        raise ModelError(
            f"not supported: {SOURCE} names {len(routers)} routers for the {len(modules)} layers with experts of "
            f"{type(model).__name__}; install a newer version, or choose another mixture, for example qwen3_moe"
        )
    return Experts(modules, routers, number, chosen, _auxiliary(model, config), _corrections(model, modules))


def _corrections(model: nn.Module, experts: tuple[nn.Module, ...]) -> dict[int, tuple[nn.Module, str]]:
    """Return module and name of the buffer that balances a layer's experts, by the layer's place; some have none."""
    names = {module: name for name, module in model.named_modules()}
    blocks = [model.get_submodule(names[one].rpartition(".")[0]) for one in experts]
    return {
        place: (module, leaf)
        for place, block in enumerate(blocks)
        for module in block.modules()
        for leaf, _ in module.named_buffers(recurse=False)
        if leaf.endswith(_CORRECTIONS)
    }


def prepare_experts(model: Model) -> None:
    """Keep what routers add to their scores in fp32, and leave the auxiliary loss to this loop, in place."""
    if not experts_of(model):
        return
    # oneDNN reads them when it first computes.
    for name in _CACHES:
        os.environ.setdefault(name, _KERNELS)
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if leaf.endswith(_CORRECTIONS) and not parameter.requires_grad:
                # Some families state it as a parameter without a gradient, which FSDP2 would cast.
                del module._parameters[leaf]
                module.register_buffer(leaf, parameter.detach())
            else:
                # Some routers are in fp32, and FSDP2 needs one dtype in a unit.
                parameter.data = parameter.data.to(embeddings_of(model).weight.dtype)
        for leaf, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and leaf not in module._non_persistent_buffers_set:
                module._buffers[leaf] = buffer.float()
    config = config_of(model)
    if getattr(config, "output_router_logits", None):
        model.trains_routers = True
        config.output_router_logits = False


def _auxiliary(model: Model, config: Config) -> float | None:
    coefficient = getattr(config, "router_aux_loss_coef", None)
    has_tokens = not has_labels(model) and embedding_of(model) is None
    if (
        not has_tokens
        or coefficient is None
        or not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    ):
        return None
    return float(coefficient) if getattr(model, "trains_routers", False) else 0.0


def _routers_of(model: Model) -> tuple[nn.Module, ...]:
    """Return the modules that choose experts, as transformers records their logits."""
    recorders = [getattr(one, "_can_record_outputs", None) for one in (model, model.base_model)]
    stated: Any = next((one["router_logits"] for one in recorders if one and "router_logits" in one), [])
    listed = stated if isinstance(stated, list) else [stated]
    kinds = [(getattr(one, "target_class", one), getattr(one, "layer_name", None) or "") for one in listed]
    return tuple(
        module
        for name, module in model.named_modules()
        if any(type(module) is kind and f".{name}".endswith(f".{place}" if place else "") for kind, place in kinds)
    )


def _chosen(config: Config) -> int:
    for part in (config, getattr(config, "ffn_config", None)):
        for name in _CHOSEN:
            value = getattr(part, name, None)
            if isinstance(value, list) and value:
                value = max(value)
            if type(value) is int:
                return value
    raise ModelError(
        f"not supported yet: {config.model_type} has experts, and its config does not say how many a token uses "
        f"({', '.join(_CHOSEN)}); choose another model, for example qwen3_moe"
    )


def choose_experts(model: Model, spec: JobSpec, device: torch.device) -> None:
    """Set the implementation of experts of a spec. Raises ModelError if the model or the device has none."""
    if not experts_of(model):
        return
    wanted = spec.model.experts_implementation
    has_kernels = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _OLDEST
    if wanted == "grouped_mm" and not has_kernels:
        raise ModelError(
            f"experts_implementation=grouped_mm needs a GPU of compute capability {_OLDEST[0]}.{_OLDEST[1]} or later; "
            "choose eager"
        )
    if model._can_set_experts_implementation():
        grouped = has_kernels and wanted != "eager" and not _odd_sizes(model, spec)
        model.set_experts_implementation("grouped_mm" if grouped else "eager")
    if device.type == "cpu":
        # Several threads would add the gradients of a token, one from each of its experts, in any order.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _odd_sizes(model: Model, spec: JobSpec) -> list[int]:
    """Return the sizes of experts with which rows are not aligned as grouped matrix products need."""
    sizes = {size for one in experts_of(model) for p in one.parameters() if p.ndim == 3 for size in p.shape[1:]}
    return sorted(size for size in sizes if size * DTYPES[spec.strategy.param_dtype].itemsize % _ALIGNED)


def _faults_of_settings(model: Model, experts: Experts, spec: JobSpec) -> dict[str, str | bool]:
    """Return the faults of settings that do not fit a model with experts, by pointer; false for settings that do."""
    name, training, z_loss = type(model).__name__, spec.training, spec.training.router_z_loss
    return {
        "/model/experts_implementation": spec.model.experts_implementation == "grouped_mm"
        and _kernel_fault(model, spec),
        "/model/router_bias_update": _balance_fault(model, experts, spec),
        "/model/compile": spec.model.compile and f"compile is not proven for experts, which {name} has; remove compile",
        "/training/per_device_train_batch_size": training.per_device_train_batch_size == AUTO
        and experts.loss_depends_on_micro_batch(training)
        and f"per_device_train_batch_size=auto depends on the memory of the workers, and the loss of routers of {name} "
        "on the size of micro-batches (router_aux_loss.scope=micro); set router_aux_loss.scope: sequence, or write a "
        "number",
        "/training/reproducible": training.reproducible == "any_size" and _any_size_fault(name, experts, spec),
        "/training/router_aux_loss": _auxiliary_fault(name, experts, spec),
        "/training/router_z_loss": bool(z_loss)
        and experts.auxiliary is None
        and f"router_z_loss {_LACKS.format(name)}; remove router_z_loss",
    }


def _kernel_fault(model: Model, spec: JobSpec) -> str | bool:
    name, dtype = type(model).__name__, spec.strategy.param_dtype
    if not model._can_set_experts_implementation():
        return f"experts_implementation=grouped_mm is not available for {name}; choose auto"
    odd = ", ".join(map(str, _odd_sizes(model, spec)))
    return bool(odd) and (
        f"experts_implementation=grouped_mm needs rows of a multiple of {_ALIGNED} bytes, and experts of {name} have "
        f"sizes of {odd} in {dtype}; choose auto"
    )


def _balance_fault(model: Model, experts: Experts, spec: JobSpec) -> str | bool:
    name, rate = type(model).__name__, spec.model.router_bias_update
    if rate is None:
        return False
    if not experts.corrections:
        instead = "" if experts.auxiliary is None else ", and set training.router_aux_loss.coef"
        return (
            f"router_bias_update={rate} needs biases that routers add to scores only to choose experts, and {name} has "
            f"none named {' or '.join(_CORRECTIONS)}; remove router_bias_update{instead}"
        )
    routers = [experts.routers[place] for place in experts.corrections]
    return _are_frozen(model, routers, spec.model.freeze_module_prefix) and (
        f"router_bias_update={rate} has no effect, because freeze_module_prefix freezes each router of {name}, and "
        "frozen ones choose as before; remove router_bias_update, or freeze fewer modules"
    )


def _are_frozen(model: nn.Module, modules: Sequence[nn.Module], prefixes: Iterable[str]) -> bool:
    """Return whether prefixes of names freeze all parameters of some modules."""
    below = tuple(f"{prefix}." for prefix in prefixes)
    named = ((name, one) for name, one in model.named_modules() if one in modules)
    return all(f"{name}.{leaf}.".startswith(below) for name, one in named for leaf, _ in one.named_parameters())


def _any_size_fault(name: str, experts: Experts, spec: JobSpec) -> str | bool:
    training = spec.training
    settings = {"ulysses_size": spec.strategy.ulysses_size > 1, "router_bias_update": spec.model.router_bias_update}
    for setting in (one for one, value in settings.items() if value):
        return f"any_size is not proven for the experts of {name} with {setting}; remove {setting}"
    return experts.loss_depends_on_micro_batch(training) and (
        "reproducible=any_size needs losses of routers that do not depend on the number of workers, and "
        f"those of {name} count the tokens of all workers together; set router_aux_loss.scope: sequence"
    )


def _auxiliary_fault(name: str, experts: Experts, spec: JobSpec) -> str | bool:
    chosen = spec.training.router_aux_loss
    has_scope = chosen.scope != "micro"
    if experts.auxiliary is None:
        lacks = bool(chosen.coef) or has_scope
        return lacks and f"router_aux_loss {_LACKS.format(name)}; remove router_aux_loss"
    coefficient = experts.auxiliary if chosen.coef is None else chosen.coef
    no_effect = has_scope and not coefficient and not spec.training.router_z_loss
    return no_effect and (
        f"scope={chosen.scope} has no effect, because the loss has the weight 0 by "
        f"{'the config of ' + name if chosen.coef is None else 'router_aux_loss.coef'}; set router_aux_loss.coef"
    )


def check_experts(model: Model, experts: Experts | None, spec: JobSpec) -> tuple[SettingCheck, ...]:
    """Return a check for each setting that does not fit the experts of a model, or their absence."""
    if experts is None:
        return rejecting(faults_without_experts(type(model).__name__, spec))
    return (
        SettingCheck("/strategy/ep_size", lambda: check_expert_plan(model, experts, spec)),
        *rejecting(_faults_of_settings(model, experts, spec)),
    )


def route_on_meta(model: nn.Module) -> None:
    """Let the experts of a model on the meta device take tokens in any order: their choice needs values."""
    for module in experts_of(model):
        module.forward = partial(_any_tokens, module)


def _any_tokens(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute tensors of the shapes of grouped matrix products, which keep as much for backward."""

    def project(values: Tensor, name: str) -> Tensor:
        weight, bias = getattr(experts, name)[0], getattr(experts, f"{name}_bias", None)
        out: Tensor = values @ (weight if experts.is_transposed else weight.T)
        return out if bias is None else out + bias[0]

    each = hidden.repeat_interleave(chosen.shape[-1], dim=0)
    if experts.has_gate:
        inner = experts._apply_gate(project(each, "gate_up_proj"))
    else:
        inner = experts.act_fn(project(each, "up_proj"))
    out = project(inner, "down_proj") * weights.reshape(-1, 1)
    summed: Tensor = out.view(*chosen.shape, -1).sum(1)
    result: Tensor = summed.to(hidden.dtype)
    return result
