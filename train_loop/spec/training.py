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
    num_train_epochs: float | None = Field(default=None, gt=0, description="1 unless max_steps or max_tokens is set")
    max_steps: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(
        default=None, ge=1, description="ends with the first step that reaches it; no padding"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="null: gradients are not clipped")
    seed: int = Field(default=0, ge=0)
    logging_steps: int = Field(default=1, ge=1)
    eval_steps: int | None = Field(default=None, ge=1, description="evaluate on data.eval so often, and at the end")
    on_nonfinite: Literal["skip", "fail"] = "skip"
    chunked_loss: bool | None = Field(
        default=None, description="logits and loss in chunks of tokens; null: where that saves memory"
    )
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1)
    z_loss: float = Field(default=0.0, ge=0, description="weight of the squared log of the softmax's denominator")
    audit_samples: bool = Field(default=False, description="every metrics line lists its sample indices")

    @model_validator(mode="after")
    def _one_of_each_pair(self) -> "TrainingSpec":
        if self.gradient_accumulation_steps is not None and self.global_batch_size is not None:
            raise ValueError(
                "gradient_accumulation_steps and global_batch_size are two names for one quantity; remove one"
            )
        ends = [name for name in ("num_train_epochs", "max_steps", "max_tokens") if getattr(self, name) is not None]
        if len(ends) > 1:
            raise ValueError(f"{' and '.join(ends)} each say when to end; keep one")
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError(
                f"lr_scheduler_type=constant has no warm-up, and warmup_steps={self.warmup_steps} would do nothing; "
                "choose constant_with_warmup, or remove warmup_steps"
            )
        return self
