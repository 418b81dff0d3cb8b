"""`training:` the optimization, with Hugging Face TrainingArguments' names."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from train_loop.spec.base import SpecModel
from train_loop.spec.schedule import Schedule, ScheduleOptions, check_known, check_lr, check_steps

OPTIMIZER_OPTIONS = {
    "adamw": ("adam_beta1", "adam_beta2", "adam_epsilon"),
    "adamw_8bit": ("adam_beta1", "adam_beta2", "adam_epsilon"),
    "muon": ("momentum", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "sgd": ("momentum",),
    "adafactor": (),
}
"""The fields that each optimizer reads, besides learning_rate and weight_decay."""


class TrainingSpec(SpecModel):
    """The settings of training. Steps are optimizer steps and batches count sequences, whatever the mesh."""

    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="not applied to norms and biases")
    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "adamw_8bit"] = Field(
        default="adamw",
        description="muon: adamw for embeddings, head, norms and biases, at one learning_rate; "
        "adamw_8bit needs torchao on the workers",
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    momentum: float | None = Field(default=None, ge=0, lt=1, description="null: 0.9 for sgd, 0.95 for muon")
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="keep an exponential moving average of the weights, in fp32; evaluations use it",
    )
    lr_scheduler_type: Schedule = "cosine"
    lr_scheduler_kwargs: ScheduleOptions = ScheduleOptions()
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps from learning rate 0 to learning_rate")
    per_device_train_batch_size: int = Field(
        default=1, ge=1, description="sequences per data-parallel rank and micro-batch"
    )
    gradient_accumulation_steps: int | None = Field(default=None, ge=1, description="1 unless global_batch_size is set")
    global_batch_size: int | None = Field(default=None, ge=1, description="sequences per optimizer step")
    num_train_epochs: float | None = Field(default=None, gt=0, description="1 unless max_steps or max_tokens is set")
    max_steps: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(
        default=None, ge=1, description="tokens without padding; the run ends with the first step that reaches it"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="null: gradients are not clipped")
    seed: int = Field(default=0, ge=0)
    logging_steps: int = Field(
        default=1, ge=1, description="optimizer steps per metrics line; its loss is the mean over them"
    )
    eval_steps: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps between evaluations on data.eval; the last step is evaluated too",
    )
    on_nonfinite: Literal["skip", "fail"] = "skip"
    chunked_loss: bool | None = Field(
        default=None, description="logits and loss in chunks of tokens; null: if that saves memory"
    )
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1)
    z_loss: float = Field(default=0.0, ge=0, description="weight of the squared log of the softmax's denominator")
    max_consecutive_skips: int = Field(
        default=10, ge=1, description="consecutive skipped steps, with non-finite loss or gradients, that fail the job"
    )
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="optimizer steps whose trace and memory go into the run directory"
    )
    audit_samples: bool = Field(default=False, description="every metrics line lists its sample indices")

    @field_validator("lr_scheduler_kwargs", mode="before")
    @classmethod
    def _options_of_the_schedule(cls, given: Any, info: ValidationInfo) -> Any:
        check_known(info.data.get("lr_scheduler_type"), given)
        return given

    @model_validator(mode="after")
    def _options_of_the_optimizer(self) -> "TrainingSpec":
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
    def _one_of_each_pair(self) -> "TrainingSpec":
        if self.gradient_accumulation_steps is not None and self.global_batch_size is not None:
            raise ValueError(
                "gradient_accumulation_steps and global_batch_size are two names for one quantity; remove one"
            )
        ends = [name for name in ("num_train_epochs", "max_steps", "max_tokens") if getattr(self, name) is not None]
        if len(ends) > 1:
            raise ValueError(f"{' and '.join(ends)} each set the end of the run; keep one")
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError(
                f"lr_scheduler_type=constant has no warm-up, so warmup_steps={self.warmup_steps} has no effect; "
                "choose constant_with_warmup, or remove warmup_steps"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> "TrainingSpec":
        check_lr(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate)
        if self.max_steps is not None:
            check_steps(self.lr_scheduler_kwargs, warmup_steps=self.warmup_steps, steps=self.max_steps)
        return self

    @model_validator(mode="after")
    def _profiled_steps_are_reached(self) -> "TrainingSpec":
        if self.max_steps is not None and max(self.profile_steps, default=0) > self.max_steps:
            raise ValueError(
                f"profile_steps={list(self.profile_steps)} has a step beyond max_steps={self.max_steps}, which would "
                "never be profiled; choose earlier ones"
            )
        return self
