"""Settings of a job that do not go with adapters, `model.lora` and `model.adapter`."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from train_loop.spec.base import Problem
from train_loop.spec.model import LoraSpec, ModelSpec
from train_loop.spec.strategy import StrategySpec
from train_loop.spec.training import TrainingSpec


class _Conflict(NamedTuple):
    """A setting that does not go with adapters, if it is chosen."""

    pointer: str
    chosen: bool
    setting: str
    reason: str


def lora_faults(strategy: StrategySpec, job: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings of a job that do not go with adapters; `job` has its valid parts."""
    model, training = job.get("model"), job.get("training")
    if model is None or (model.lora is None and model.adapter is None):
        return
    name = "lora" if model.adapter is None else "adapter"
    # Settings in a folder of adapters are checked once they have been read.
    lora = model.lora or LoraSpec()
    conflicts = [
        _Conflict("/code", job.get("code") is not None, "own code (code)", "is not supported yet"),
        *_of_model(model, lora),
        *_of_tensor_parallelism(strategy.tp_size, model, lora, trains=training is not None),
        *_of_strategy(strategy, lora),
        *([] if training is None else _of_training(training, lora)),
    ]
    for one in conflicts:
        if one.chosen:
            yield Problem(one.pointer, f"{one.setting} {one.reason} with model.{name}; change it, or remove {name}")


def _of_model(model: ModelSpec, lora: LoraSpec) -> Iterator[_Conflict]:
    yield _Conflict(
        "/model/freeze_module_prefix",
        bool(model.freeze_module_prefix),
        f"freeze_module_prefix={', '.join(model.freeze_module_prefix)}",
        "has no effect, because only adapters are trained: name modules in target_modules, or layers",
    )
    if model.compile:
        broken = "is not supported, because graphs break in peft's code of DoRA"
        few, quantized = model.quantize_base is not None, f"compile with quantize_base={model.quantize_base}"
        yield _Conflict("/model/compile", lora.use_dora, "compile with use_dora", broken)
        yield _Conflict("/model/compile", few, quantized, "is not proven")


def _of_tensor_parallelism(tp: int, model: ModelSpec, lora: LoraSpec, *, trains: bool) -> Iterator[_Conflict]:
    if tp == 1:
        return
    rules = {
        "use_dora": (lora.use_dora, "is not supported, because a rank has parts of the rows whose norms it needs"),
        f"dropout={lora.dropout}": (
            trains and lora.dropout > 0,
            "is not supported, because ranks that share layers would have to draw alike",
        ),
        f"quantize_base={model.quantize_base}": (model.quantize_base is not None, "is not proven"),
    }
    for setting, (chosen, reason) in rules.items():
        yield _Conflict("/strategy/tp_size", chosen, f"tp_size={tp} with {setting}", reason)


def _of_strategy(strategy: StrategySpec, lora: LoraSpec) -> Iterator[_Conflict]:
    experts = bool(lora.target_parameters)
    yield _Conflict("/strategy/sequence_parallel", strategy.sequence_parallel, "sequence_parallel", "is not proven")
    yield _Conflict("/strategy/ignored_params", bool(strategy.ignored_params), "ignored_params", "is not proven")
    yield _Conflict(
        "/strategy/ep_size",
        strategy.ep_size > 1 and experts,
        f"ep_size={strategy.ep_size} with target_parameters",
        "is not supported, because an adapter of experts is one matrix for all of them",
    )
    yield _Conflict(
        "/strategy/wrap_policy/moe_experts",
        bool(strategy.wrap_policy.moe_experts) and experts,
        "moe_experts with target_parameters",
        "is not supported, because adapters are outside of the experts' unit",
    )


def _of_training(training: TrainingSpec, lora: LoraSpec) -> Iterator[_Conflict]:
    yield _Conflict(
        "/training/optimizer",
        training.optimizer == "muon" and bool(lora.target_parameters),
        "optimizer=muon with target_parameters",
        "is not supported, because an adapter has the matrices of all experts in one",
    )
    yield _Conflict(
        "/training/optimizer_state",
        training.optimizer_state is not None,
        "optimizer_state",
        "is not supported: it belongs to the weights of a folder, which are frozen",
    )
