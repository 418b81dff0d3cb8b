"""The optimizer of `training:`, with Hugging Face TrainingArguments' names."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from train_loop.spec.base import SpecModel, is_default
from train_loop.spec.strategy import ModulePattern

_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
OPTIMIZER_OPTIONS = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "adamw_8bit": _ADAM,
    "schedule_free_adamw": _ADAM,
    "lion": ("adam_beta1", "adam_beta2"),
    "muon": ("momentum", *_ADAM),
    "sgd": ("momentum",),
    "adafactor": (),
}
"""The fields that each optimizer reads, besides learning_rate and weight_decay."""
SCHEDULE_FREE = "schedule_free_adamw"
WITHOUT_FOLDER = ("adamw_8bit", SCHEDULE_FREE)
"""Optimizers whose states are not written to a folder or file, nor read from one."""
_LION_BETA2 = 0.99
"""The default of Lion's paper."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class ParameterGroupSpec(SpecModel):
    """Parameters with their own settings; null means the setting that they have without the group."""

    params: tuple[ModulePattern, ...] = Field(
        min_length=1,
        max_length=64,
        description="names of parameters, paths of modules, or globs of either (* for any characters); a parameter is "
        "in the last group that matches it",
    )
    learning_rate: float | None = Field(
        default=None, gt=0, description="peak learning rate, in place of training.learning_rate and layer_decay"
    )
    lr_scale: float | None = Field(default=None, gt=0, description="factor of the learning rate; not with the former")
    weight_decay: float | None = Field(
        default=None, ge=0, description="weight decay of all parameters of the group, also of norms and biases"
    )
    betas: tuple[Beta, Beta] | None = Field(
        default=None, description="decay rates of both moments, in place of adam_beta1 and adam_beta2"
    )

    @model_validator(mode="after")
    def _sets_something_once(self) -> "ParameterGroupSpec":
        if self.learning_rate is not None and self.lr_scale is not None:
            raise ValueError("learning_rate and lr_scale each set the learning rate of the group; remove one")
        if all(getattr(self, name) is None for name in ("learning_rate", "lr_scale", "weight_decay", "betas")):
            raise ValueError(
                f"the group of {', '.join(self.params)} sets nothing; add learning_rate, lr_scale, weight_decay or "
                "betas, or remove it"
            )
        return self


class OptimizerSpec(SpecModel):
    """The settings of the optimizer."""

    learning_rate: float = Field(gt=0, description="peak learning rate")
    weight_decay: float = Field(
        default=0.0, ge=0, description="weight decay; not applied to norms, biases and other vectors"
    )
    optimizer: Literal["adamw", "adam", "sgd", "adafactor", "muon", "adamw_8bit", "lion", "schedule_free_adamw"] = (
        Field(
            default="adamw",
            description="adam: weight_decay is added to gradients; muon: for matrices of linear layers, and adamw for "
            "all else, at the same learning_rate; adamw_8bit: needs torchao on the workers; schedule_free_adamw: "
            "evaluation and export use averaged weights; lr_scheduler_type is constant or constant_with_warmup",
        )
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay rate of the first moment")
    adam_beta2: float = Field(
        default=0.999, ge=0, lt=1, description="decay rate of the second moment; of lion's momentum, by default 0.99"
    )
    adam_epsilon: float = Field(default=1e-8, gt=0, description="term added to the denominator")
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="momentum of sgd and muon; null: 0.9 for sgd, 0.95 for muon"
    )
    groups: tuple[ParameterGroupSpec, ...] = Field(
        default=(),
        exclude_if=is_default(()),
        max_length=64,
        description="groups of parameters with their own settings",
    )
    layer_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        exclude_if=is_default(None),
        description="factor of the learning rate from one layer to the one before: layer i of L has learning_rate x "
        "layer_decay^(L - i), parts that the model lists before its layers layer_decay^(L + 1), and the head 1",
    )

    @model_validator(mode="after")
    def _defaults_of_lion(self) -> "OptimizerSpec":
        if self.optimizer == "lion" and "adam_beta2" not in self.model_fields_set:
            # Not before validation: that would read JSON with Python's types.
            object.__setattr__(self, "adam_beta2", _LION_BETA2)
        return self

    @field_validator("groups")
    @classmethod
    def _groups_have_what_the_optimizer_reads(
        cls, groups: tuple[ParameterGroupSpec, ...], info: ValidationInfo
    ) -> tuple[ParameterGroupSpec, ...]:
        optimizer = info.data.get("optimizer")
        with_betas = [name for name, options in OPTIMIZER_OPTIONS.items() if options[:1] == ("adam_beta1",)]
        for group in groups:
            if group.betas is not None and optimizer is not None and optimizer not in with_betas:
                raise ValueError(
                    f"betas of the group {', '.join(group.params)} have no effect on all of its parameters with "
                    f"optimizer={optimizer}; remove them, or choose {', '.join(with_betas[:-1])} or {with_betas[-1]}"
                )
        return groups

    @model_validator(mode="after")
    def _options_of_the_optimizer(self) -> "OptimizerSpec":
        # Compared with defaults, because the resolved spec that workers read has every field set.
        used = OPTIMIZER_OPTIONS[self.optimizer]
        for name in dict.fromkeys(option for options in OPTIMIZER_OPTIONS.values() for option in options):
            value = getattr(self, name)
            if name not in used and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value} has no effect with optimizer={self.optimizer}, whose options are "
                    f"{', '.join(used) or 'none'}; remove it, or choose another optimizer"
                )
        return self

    @model_validator(mode="after")
    def _average_can_be_computed(self) -> "OptimizerSpec":
        rates = [self.adam_beta1, *(group.betas[0] for group in self.groups if group.betas is not None)]
        if self.optimizer == SCHEDULE_FREE and not all(rates):
            raise ValueError(
                f"optimizer={SCHEDULE_FREE} computes its average from the weights with 1 / adam_beta1, and it is 0; "
                "choose one above 0, such as 0.9"
            )
        return self
