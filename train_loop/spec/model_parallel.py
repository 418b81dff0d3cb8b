"""Settings that do not go with tensor parallelism (`tp_size`), expert parallelism (`ep_size`), adapters or `float8`."""

from collections.abc import Iterator, Mapping
from typing import Any

from train_loop.spec.base import Problem
from train_loop.spec.model import BudgetSpec
from train_loop.spec.optimizer import SCHEDULE_FREE
from train_loop.spec.strategy import StrategySpec


def tensor_faults(strategy: StrategySpec, job: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings of a job that ranks cannot share layers with; `job` has its valid parts."""
    if strategy.tp_size == 1:
        return
    model, training, reshard = job.get("model"), job.get("training"), strategy.reshard_after_forward
    settings = {
        "own code (code)": (
            "/strategy/tp_size",
            job.get("code") is not None,
            "which has no plan of how ranks share its layers",
        ),
        f"reshard_after_forward={reshard}": (
            "/strategy/reshard_after_forward",
            _is_group(reshard),
            "for which torch makes groups of ranks that wait for each other",
        ),
        "strategy.precision": (
            "/strategy/precision",
            bool(strategy.precision),
            "whose units are not proven for shared layers",
        ),
        "gradient_sync=last": (
            "/strategy/gradient_sync",
            strategy.gradient_sync == "last",
            "which is not proven for shared layers",
        ),
        "offload_policy=optimizer": (
            "/strategy/offload_policy",
            strategy.offload_policy == "optimizer",
            "which is not proven for shared layers",
        ),
        "ignored_params": (
            "/strategy/ignored_params",
            bool(strategy.ignored_params),
            "which is not proven for shared layers",
        ),
    }
    if model is not None:
        settings |= {
            "model.head=masked_lm": (
                "/model/head",
                model.masked is not None,
                "whose models have no plan of how ranks share layers",
            ),
            "model.compile: true": (
                "/model/compile",
                model.compile,
                "because the graph of a layer breaks at each exchange",
            ),
        }
    if training is not None:
        settings["training.optimizer=adamw_8bit"] = (
            "/training/optimizer",
            training.optimizer == "adamw_8bit",
            "whose blocks of values that share a scale would be others",
        )
    for setting, (pointer, chosen, reason) in settings.items():
        if chosen:
            fault = f"tp_size={strategy.tp_size} does not support {setting}, {reason}"
            yield Problem(pointer, f"{fault}; change it, or choose tp_size=1")


def expert_faults(strategy: StrategySpec, job: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings of a job that are not proven for ranks that share experts; `job` has its valid parts."""
    if strategy.ep_size == 1:
        return
    training, least, reshard = job.get("training"), strategy.wrap_policy.min_num_params, strategy.reshard_after_forward
    settings = {
        "sharding_strategy: NO_SHARD": ("/strategy/sharding_strategy", strategy.sharding_strategy == "NO_SHARD"),
        f"min_num_params={least}": ("/strategy/wrap_policy/min_num_params", least is not None),
        f"reshard_after_forward={reshard}": ("/strategy/reshard_after_forward", _is_group(reshard)),
        "strategy.precision": ("/strategy/precision", bool(strategy.precision)),
        "gradient_sync=last": ("/strategy/gradient_sync", strategy.gradient_sync == "last"),
        "offload_policy=optimizer": ("/strategy/offload_policy", strategy.offload_policy == "optimizer"),
        "ignored_params": ("/strategy/ignored_params", bool(strategy.ignored_params)),
    }
    if training is not None:
        settings |= {
            f"training.reproducible={training.reproducible}": (
                "/training/reproducible",
                training.reproducible != "same_size",
            ),
            f"training.optimizer={training.optimizer}": ("/training/optimizer", training.optimizer == "adamw_8bit"),
        }
    for setting, (pointer, chosen) in settings.items():
        if chosen:
            fault = f"{setting} is not proven with ep_size={strategy.ep_size}"
            yield Problem(pointer, f"{fault}; change it, or choose ep_size=1")


def lora_faults(strategy: StrategySpec, job: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings of a job that do not go with adapters; `job` has its valid parts."""
    model, training = job.get("model"), job.get("training")
    if model is None or (model.lora is None and model.adapter is None):
        return
    name = "lora" if model.adapter is None else "adapter"
    frozen, experts = model.freeze_module_prefix, model.lora is not None and bool(model.lora.target_parameters)
    settings = {
        "/code": (job.get("code") is not None, "own code (code)", "is not supported yet"),
        "/model/freeze_module_prefix": (
            bool(frozen),
            f"freeze_module_prefix={', '.join(frozen)}",
            "has no effect, because only adapters are trained: name modules in target_modules, or layers",
        ),
        "/model/compile": (
            model.compile and model.lora is not None and model.lora.use_dora,
            "compile with use_dora",
            "is not supported, because graphs break in peft's code of DoRA",
        ),
        "/model/quantize_base": (
            model.compile and model.quantize_base is not None,
            f"quantize_base={model.quantize_base} with compile",
            "is not proven",
        ),
        "/strategy/tp_size": (strategy.tp_size > 1, f"tp_size={strategy.tp_size}", "is not proven"),
        "/strategy/ep_size": (strategy.ep_size > 1, f"ep_size={strategy.ep_size}", "is not proven"),
        "/strategy/ignored_params": (bool(strategy.ignored_params), "ignored_params", "is not proven"),
        "/strategy/wrap_policy/moe_experts": (
            bool(strategy.wrap_policy.moe_experts) and experts,
            "moe_experts with target_parameters",
            "is not supported, because adapters are outside of the experts' unit",
        ),
    }
    if training is not None:
        settings |= {
            "/training/optimizer": (
                training.optimizer == "muon" and experts,
                "optimizer=muon with target_parameters",
                "is not supported, because an adapter has the matrices of all experts in one",
            ),
            "/training/optimizer_state": (
                training.optimizer_state is not None,
                "optimizer_state",
                "is not supported: it belongs to the weights of a folder, which are frozen",
            ),
        }
    for pointer, (chosen, setting, reason) in settings.items():
        if chosen:
            yield Problem(pointer, f"{setting} {reason} with model.{name}; change it, or remove {name}")


def float8_faults(strategy: StrategySpec, job: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings of a job that are not proven with linear layers in float8; `job` has its valid parts."""
    if strategy.float8 is None:
        return
    model, training, reshard = job.get("model"), job.get("training"), strategy.reshard_after_forward
    gathers = strategy.float8 == "tensorwise"
    settings = {
        "own code (code)": ("/strategy/float8", job.get("code") is not None),
        f"tp_size={strategy.tp_size}": ("/strategy/tp_size", strategy.tp_size > 1),
        "strategy.precision": ("/strategy/precision", bool(strategy.precision)),
        "ignored_params": ("/strategy/ignored_params", bool(strategy.ignored_params)),
        f"offload_policy={_text(strategy.offload_policy)}": (
            "/strategy/offload_policy",
            strategy.offload_policy is not False and gathers,
        ),
        f"reshard_after_forward={reshard}": ("/strategy/reshard_after_forward", _is_group(reshard) and gathers),
    }
    if model is not None:
        settings |= {
            "model.dtype=fp16": ("/model/dtype", model.dtype == "fp16"),
            "model.lora": ("/model/lora", model.lora is not None and model.adapter is None),
            "model.adapter": ("/model/adapter", model.adapter is not None),
            f"model.gradient_checkpointing={model.gradient_checkpointing}": (
                "/model/gradient_checkpointing",
                model.gradient_checkpointing == "selective" or isinstance(model.gradient_checkpointing, BudgetSpec),
            ),
        }
    if training is not None:
        settings[f"training.optimizer={training.optimizer}"] = (
            "/training/optimizer",
            gathers and training.optimizer in ("muon", "adafactor", "adamw_8bit", "lion", SCHEDULE_FREE),
        )
    for setting, (pointer, chosen) in settings.items():
        if chosen:
            fault = f"{setting} is not proven with float8={strategy.float8}"
            yield Problem(pointer, f"{fault}; change it, or remove float8")


def _text(value: bool | str) -> str:
    return str(value).lower()


def _is_group(reshard: bool | int | None) -> bool:
    """Return whether parameters are resharded to groups of some ranks."""
    return reshard is not None and not isinstance(reshard, bool)
