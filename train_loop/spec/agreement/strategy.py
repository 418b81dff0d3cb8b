"""Settings of `strategy` that do not go with other parts of a job, such as its model, adapters or `any_size`."""

from collections.abc import Iterator, Mapping
from typing import Any

from train_loop.spec.agreement.adapters import lora_faults
from train_loop.spec.base import Problem, SpecError
from train_loop.spec.model import BudgetSpec
from train_loop.spec.optimizer import SCHEDULE_FREE
from train_loop.spec.strategy import StrategySpec


def check_strategy(strategy: StrategySpec, job: Mapping[str, Any]) -> None:
    """Raise ValueError or SpecError for settings that do not go with other parts; `job` has those that are valid."""
    for check in (_check_dtypes, _check_any_size, _check_offloading, _check_wholes):
        check(strategy, job)
    rules = (tensor_faults, expert_faults, lora_faults, float8_faults)
    if found := [fault for rule in rules for fault in rule(strategy, job)]:
        raise SpecError(found)
    _check_compiled(strategy, job)


def _check_dtypes(strategy: StrategySpec, job: Mapping[str, Any]) -> None:
    model = job.get("model")
    if model is not None and model.dtype != strategy.param_dtype:
        raise ValueError(
            f"param_dtype={strategy.param_dtype} contradicts model.dtype={model.dtype}; remove one or make them equal"
        )
    if model is not None and strategy.output_dtype == "fp16" and model.dtype != "fp16":
        raise ValueError(
            f"output_dtype=fp16 needs the gradient scaler of model.dtype=fp16, and model.dtype is {model.dtype}; "
            "choose output_dtype bf16 or fp32"
        )
    if model is not None and "fp16" in strategy.precision.values() and model.dtype != "fp16":
        raise ValueError(
            f"precision names fp16, which needs the gradient scaler of model.dtype=fp16, and model.dtype is "
            f"{model.dtype}; choose bf16 or fp32"
        )


def _check_any_size(strategy: StrategySpec, job: Mapping[str, Any]) -> None:
    model, training = job.get("model"), job.get("training")
    if model is None or training is None or training.reproducible == "same_size":
        return
    unproven = {
        f"model.dtype={model.dtype}": model.dtype == "fp16",
        f"model.master_dtype={model.master_dtype}": model.master_dtype != "fp32",
        f"tp_size={strategy.tp_size}": strategy.tp_size > 1,
        f"reduce_dtype={strategy.reduce_dtype}": strategy.reduce_dtype != "fp32",
        "strategy.precision": bool(strategy.precision),
        f"float8={strategy.float8}, with scales that depend on the tokens of a rank,": strategy.float8 is not None,
        f"gradient_sync={strategy.gradient_sync}": strategy.gradient_sync == "last",
        "offload_policy=optimizer": strategy.offload_policy == "optimizer",
        "ignored_params": bool(strategy.ignored_params),
        f"matmul_precision={strategy.matmul_precision}": strategy.matmul_precision != "highest",
        f"ulysses_size={strategy.ulysses_size} with sharding_strategy=NO_SHARD": strategy.ulysses_size > 1
        and strategy.sharding_strategy == "NO_SHARD",
        f"ulysses_size={strategy.ulysses_size} with own code (code)": strategy.ulysses_size > 1
        and job.get("code") is not None,
    }
    for setting, chosen in unproven.items():
        if chosen:
            raise ValueError(
                f"{setting} is not proven to give the same bits at every size; change it, or choose "
                "training.reproducible=same_size"
            )


def _check_offloading(strategy: StrategySpec, job: Mapping[str, Any]) -> None:
    model, training = job.get("model"), job.get("training")
    offloads = model is None or model.gradient_checkpointing == "offload" or strategy.offload_policy is not False
    if not strategy.pin_memory and not offloads:
        raise ValueError(
            "pin_memory=false has no effect without offload_policy and model.gradient_checkpointing: offload; remove it"
        )
    optimizer = None if training is None else training.optimizer
    if strategy.offload_policy == "optimizer" and optimizer in ("adafactor", "adamw_8bit"):
        raise ValueError(
            f"offload_policy=optimizer is not supported with optimizer={optimizer}, whose state is small; choose "
            "offload_policy true or false, or another optimizer"
        )


def _check_wholes(strategy: StrategySpec, job: Mapping[str, Any]) -> None:
    model, training = job.get("model"), job.get("training")
    if not strategy.ignored_params or model is None or training is None:
        return
    unproven = {
        f"training.optimizer={training.optimizer}": training.optimizer in ("muon", "adamw_8bit"),
        "model.dtype=fp16": model.dtype == "fp16",
    }
    for setting, chosen in unproven.items():
        if chosen:
            raise ValueError(f"ignored_params is not proven with {setting}; change it, or remove ignored_params")


def _check_compiled(strategy: StrategySpec, job: Mapping[str, Any]) -> None:
    model = job.get("model")
    if model is not None and model.compile and strategy.norm_dtype is not None:
        raise ValueError(
            f"norm_dtype={strategy.norm_dtype} makes each norm a separate FSDP unit, which breaks the graph of "
            "its layer, so model.compile has no effect; remove one of the two"
        )


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
