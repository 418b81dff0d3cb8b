"""`training:` the arithmetic of learning, with Hugging Face TrainingArguments' names."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from train_loop.spec.base import SpecModel, only

Schedule = Literal[
    "linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "wsd"
]
SUPPORTED_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")


class TrainingSpec(SpecModel):
    """Steps are optimizer steps, batches are counted in sequences, whatever the mesh."""

    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="not applied to norms and biases")
    optimizer: Annotated[Literal["adamw", "sgd", "adafactor", "muon", "adamw_8bit"], only("adamw")] = "adamw"
    lr_scheduler_type: Annotated[Schedule, only(*SUPPORTED_SCHEDULES)] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    per_device_train_batch_size: int = Field(
        default=1, ge=1, description="sequences per data-parallel rank and micro-batch"
    )
    gradient_accumulation_steps: int | None = Field(default=None, ge=1, description="1 unless global_batch_size is set")
    global_batch_size: int | None = Field(default=None, ge=1, description="sequences per optimizer step")
    num_train_epochs: float | None = Field(default=None, gt=0, description="1 unless max_steps is set")
    max_steps: int | None = Field(default=None, ge=1)
    max_tokens: Annotated[int | None, only(None)] = None
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="null: gradients are not clipped")
    seed: int = Field(default=0, ge=0)
    logging_steps: int = Field(default=1, ge=1)
    eval_steps: Annotated[int | None, only(None)] = None
    on_nonfinite: Literal["skip", "fail"] = "skip"
    max_consecutive_skips: int = Field(
        default=10, ge=1, description="so many steps in a row that were not finite and skipped fail the job"
    )
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="optimizer steps whose trace and memory go into the run directory"
    )
    audit_samples: bool = Field(default=False, description="every metrics line lists its sample indices")

    @model_validator(mode="after")
    def _one_of_each_pair(self) -> "TrainingSpec":
        if self.gradient_accumulation_steps is not None and self.global_batch_size is not None:
            raise ValueError(
                "gradient_accumulation_steps and global_batch_size are two names for one quantity; remove one"
            )
        if self.num_train_epochs is not None and self.max_steps is not None:
            raise ValueError("num_train_epochs and max_steps both say when to end; remove one")
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError(
                f"lr_scheduler_type=constant has no warm-up, and warmup_steps={self.warmup_steps} would do nothing; "
                "choose constant_with_warmup, or remove warmup_steps"
            )
        return self

    @model_validator(mode="after")
    def _profiled_steps_are_reached(self) -> "TrainingSpec":
        if self.max_steps is not None and max(self.profile_steps, default=0) > self.max_steps:
            raise ValueError(
                f"profile_steps={list(self.profile_steps)} has a step beyond max_steps={self.max_steps}, which would "
                "never be profiled; choose earlier ones"
            )
        return self
