"""The optimizer of `training:`, with Hugging Face TrainingArguments' names."""

from typing import Literal

from pydantic import Field, model_validator

from train_loop.spec.base import SpecModel

OPTIMIZER_OPTIONS = {
    "adamw": ("adam_beta1", "adam_beta2", "adam_epsilon"),
    "adamw_8bit": ("adam_beta1", "adam_beta2", "adam_epsilon"),
    "muon": ("momentum", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "sgd": ("momentum",),
    "adafactor": (),
}
"""The fields that each optimizer reads, besides learning_rate and weight_decay."""


class OptimizerSpec(SpecModel):
    """The settings of the optimizer."""

    learning_rate: float = Field(gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay; not applied to norms and biases")
    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "adamw_8bit"] = Field(
        default="adamw",
        description="muon: adamw for embeddings, head, norms and biases, at the same learning_rate; adamw_8bit: "
        "needs torchao on the workers",
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay rate of the first moment")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="decay rate of the second moment")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="term added to the denominator")
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="momentum of sgd and muon; null: 0.9 for sgd, 0.95 for muon"
    )

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
