"""`model.lora:` low-rank adapters, and the settings that do not go with them."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_core import to_json

from train_loop.spec.base import Problem, SpecModel, only

if TYPE_CHECKING:
    from train_loop.spec.strategy import StrategySpec

ModuleName = Annotated[str, StringConstraints(min_length=1)]
ALL_LINEAR: Literal["all-linear"] = "all-linear"


class LoraSpec(SpecModel):
    """Low-rank adapters (Hu et al., 2021) on a frozen model, by peft."""

    r: int = Field(default=16, gt=0, description="rank of the adapters")
    alpha: float = Field(
        default=32, gt=0, description="scale of the adapters: they count alpha / r, with use_rslora alpha / sqrt(r)"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout probability of the adapters' inputs")
    target_modules: Literal["all-linear"] | tuple[ModuleName, ...] = Field(
        default=ALL_LINEAR,
        description="modules with adapters, by name or its last parts, as q_proj; all-linear: every linear layer but "
        "the head and routers of experts",
    )
    target_parameters: tuple[ModuleName, ...] = Field(
        default=(),
        description="parameters with adapters, by name or its last parts: the tensors of all experts of a layer, as "
        "experts.gate_up_proj",
    )
    modules_to_save: tuple[ModuleName, ...] = Field(
        default=(), description="modules that are trained whole beside the adapters, by name or its last parts"
    )
    use_rslora: bool = Field(default=False, description="scale adapters by alpha / sqrt(r)")
    use_dora: bool = Field(default=False, description="also train the magnitude of each output of a target (DoRA)")
    init: Annotated[
        Literal["kaiming", "gaussian", "orthogonal", "pissa", "olora", "eva", "corda", "loftq"],
        only("kaiming", "gaussian"),
    ] = Field(
        default="kaiming",
        description="initial values of A; B starts at 0; kaiming: those of a linear layer; gaussian: with a standard "
        "deviation of 1 / r",
    )
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="numbers of the layers with adapters, from 0; null: all"
    )

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / (self.r**0.5 if self.use_rslora else self.r)

    @field_validator("target_modules", mode="before")
    @classmethod
    def _is_a_list(cls, targets: Any) -> Any:
        if targets == ALL_LINEAR:
            return targets
        if isinstance(targets, str):
            raise ValueError(f"{targets:.100} is not a list; write [{targets:.100}], or {ALL_LINEAR}")
        if not isinstance(targets, list | tuple) or not all(isinstance(name, str) and name for name in targets):
            raise ValueError(f"{to_json(targets).decode():.100} is not a list of names; write one, or {ALL_LINEAR}")
        return tuple(targets)

    @model_validator(mode="after")
    def _adapts_something(self) -> "LoraSpec":
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "target_modules and target_parameters are both empty, so there are no adapters; name one, or choose "
                "target_modules: all-linear"
            )
        if self.layers == ():
            raise ValueError("layers names no layer, so there are no adapters; name one, or remove layers")
        return self

    @model_validator(mode="after")
    def _parameters_have_no_inputs(self) -> "LoraSpec":
        if self.target_parameters and self.dropout:
            raise ValueError(
                f"dropout={self.dropout} needs the inputs of adapters, and those of target_parameters are added to the "
                "weights; set dropout: 0, or remove target_parameters"
            )
        if self.target_parameters and self.use_dora:
            raise ValueError(
                "use_dora is for linear layers, and peft has none for target_parameters; set use_dora: false, or "
                "remove target_parameters"
            )
        return self


def lora_faults(strategy: "StrategySpec", job: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings of a job that do not go with adapters; `job` has its valid parts."""
    model, training = job.get("model"), job.get("training")
    if model is None or (lora := model.lora) is None:
        return
    frozen, experts = model.freeze_module_prefix, bool(lora.target_parameters)
    settings = {
        "/code": (job.get("code") is not None, "own code (code)", "is not supported yet"),
        "/model/freeze_module_prefix": (
            bool(frozen),
            f"freeze_module_prefix={', '.join(frozen)}",
            "has no effect, because only adapters are trained: name modules in target_modules, or layers",
        ),
        "/model/compile": (
            model.compile and experts,
            "compile with target_parameters",
            "is not supported, because each call changes the experts' module",
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
            yield Problem(pointer, f"{setting} {reason} with model.lora; change it, or remove lora")
