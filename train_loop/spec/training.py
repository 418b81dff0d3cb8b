"""`training:` the optimization, with Hugging Face TrainingArguments' names."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from train_loop.spec.base import SpecModel, check_folder, is_default
from train_loop.spec.names.spellings import AUTO, nearest_value
from train_loop.spec.optimizer import SCHEDULE_FREE, WITHOUT_FOLDER, OptimizerSpec
from train_loop.spec.schedule import PLATEAU, Schedule, ScheduleOptions, check_known, check_lr, check_steps


class ReductionTreeSpec(SpecModel):
    """The largest mesh of an `any_size` run, in data-parallel ranks. Smaller meshes divide it."""

    max_shards: int = Field(ge=1, description="largest number of data-parallel ranks in a shard group: a power of two")
    max_replicas: int = Field(default=1, ge=1, description="largest number of shard groups (HSDP): a power of two")

    @field_validator("max_shards", "max_replicas")
    @classmethod
    def _is_a_power_of_two(cls, size: int) -> int:
        if size & (size - 1):
            below = 1 << (size.bit_length() - 1)
            raise ValueError(f"{size} is not a power of two; choose {below} or {2 * below}")
        return size


class RouterAuxLossSpec(SpecModel):
    """The auxiliary loss that spreads tokens over the experts of a mixture of experts."""

    coef: float | None = Field(
        default=None,
        ge=0,
        description="weight of the loss; null: that of the model's own config, which is 0 unless it sets "
        "output_router_logits",
    )
    scope: Literal["micro", "sequence", "step"] = Field(
        default="micro",
        description="tokens of one mean: micro: those of a micro-batch on all ranks, as transformers; sequence: those "
        "of each document, so that the number of ranks does not matter; step: not supported",
    )

    @field_validator("scope")
    @classmethod
    def _is_exact(cls, scope: str) -> str:
        if scope == "step":
            raise ValueError(
                "scope=step is not supported: it needs the counts of all micro-batches before the first backward pass, "
                "so that each would be computed twice; choose micro or sequence"
            )
        return scope


class TrainingSpec(OptimizerSpec):
    """The settings of training. Steps are optimizer steps and batches count sequences, whatever the mesh."""

    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of an exponential moving average of the weights, in fp32; evaluation uses it; null: no "
        "average",
    )
    lr_scheduler_type: Schedule = Field(default="cosine", description="learning rate schedule")
    lr_scheduler_kwargs: ScheduleOptions = Field(default=ScheduleOptions(), description="options of the schedule")
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0,
        description="optimizer steps from learning rate 0 to learning_rate, or a fraction of the run, rounded up",
    )
    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1,
        description="sequences per data-parallel rank and micro-batch; auto: the workers take the largest that fits "
        "their memory by the plan, at the same global_batch_size, and the next smaller one if they run out of memory",
    )
    gradient_accumulation_steps: int | None = Field(
        default=None, ge=1, description="micro-batches per optimizer step; null: 1, or from global_batch_size"
    )
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="sequences per optimizer step, at any number of workers; null: from the two fields above and "
        "the number of workers",
    )
    num_train_epochs: float | None = Field(
        default=None,
        gt=0,
        description="length of the run in epochs; null: 1 unless max_steps or max_tokens is set; with max_steps, the "
        "earlier end",
    )
    max_steps: int | None = Field(default=None, ge=1, description="length of the run in optimizer steps")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="length of the run in tokens, without padding; it ends with the first step that reaches them",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="maximum norm of the gradients; null: no clipping"
    )
    optimizer_state: str | None = Field(
        default=None,
        exclude_if=is_default(None),
        description="URI of a folder with the optimizer state of another run, from `trainshed export --with "
        "optimizer`; the run continues at its step, with the weights in model.path",
    )
    seed: int = Field(default=0, ge=0, description="seed of random weights and dropout")
    reproducible: Literal["same_size", "any_size"] = Field(
        default="same_size",
        description="runs that end with the same bits: same_size: those with the same number of workers, resumed or "
        "not; any_size: also those with other numbers of workers, and resized ones",
    )
    deterministic: bool = Field(
        default=False,
        exclude_if=is_default(False),
        description="use torch's deterministic algorithms, which may be slower; an operation without one ends the run",
    )
    reduction_tree: ReductionTreeSpec | None = Field(
        default=None,
        description="largest mesh of an any_size run, which fixes the order of its sums; null: from num_workers",
    )
    logging_steps: int = Field(
        default=1, ge=1, description="optimizer steps per metrics line, whose loss is the mean over them"
    )
    eval_steps: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps between evaluations on data.eval; the last step is always evaluated",
    )
    on_nonfinite: Literal["skip", "fail"] = Field(
        default="skip", description="steps with a non-finite loss or gradient: skip the update, or fail the job"
    )
    chunked_loss: bool | None = Field(
        default=None, description="compute logits and loss in chunks of tokens; null: if that saves memory"
    )
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1, description="label smoothing, from 0 to below 1")
    z_loss: float = Field(
        default=0.0, ge=0, description="weight of the squared log of the softmax's denominator in the loss"
    )
    router_aux_loss: RouterAuxLossSpec = Field(
        default=RouterAuxLossSpec(), description="auxiliary loss of a mixture of experts"
    )
    router_z_loss: float | None = Field(
        default=None,
        ge=0,
        description="weight of the squared log of the denominator of routers' softmax; null: none",
    )
    max_consecutive_skips: int = Field(default=10, ge=1, description="consecutive skipped steps that fail the job")
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="optimizer steps to profile; trace and memory are written to the run directory"
    )
    audit_samples: bool = Field(default=False, description="write the sample indices of each step to its metrics line")

    @property
    def epochs(self) -> float | None:
        """The epochs after which the run ends at the latest; None if only steps or tokens end it."""
        alone = self.max_steps is None and self.max_tokens is None
        return 1.0 if alone and self.num_train_epochs is None else self.num_train_epochs

    def warmup_of(self, steps: int) -> int:
        """Return the warm-up of a run of `steps` optimizer steps; fractions are rounded up, as in transformers."""
        return self.warmup_steps if isinstance(self.warmup_steps, int) else math.ceil(steps * self.warmup_steps)

    @field_validator("warmup_steps", mode="before")
    @classmethod
    def _is_steps_or_a_fraction(cls, given: Any) -> Any:
        """Raise a single error instead of pydantic's error for each type of the field."""
        whole = isinstance(given, int | float) and not isinstance(given, bool) and given == int(given)
        fraction = isinstance(given, float) and 0 < given < 1
        if not fraction and not (whole and given >= 0):
            raise ValueError(
                f"invalid warmup_steps={given!s:.64}; expected a number of optimizer steps, or a fraction of the run "
                "from 0 to below 1"
            )
        return int(given) if whole else given

    @field_validator("per_device_train_batch_size", mode="before")
    @classmethod
    def _is_a_number(cls, size: Any) -> Any:
        """Raise a single error instead of pydantic's error for each type of the field."""
        if size != AUTO and (isinstance(size, bool) or not isinstance(size, int)):
            near = nearest_value(size, [AUTO])
            meant = f"; did you mean {near}?" if near else ""
            raise ValueError(
                f"invalid per_device_train_batch_size={size!s:.64}; expected a number of sequences, or auto{meant}"
            )
        return size

    @field_validator("lr_scheduler_kwargs", mode="before")
    @classmethod
    def _options_of_the_schedule(cls, given: Any, info: ValidationInfo) -> Any:
        check_known(info.data.get("lr_scheduler_type"), given)
        return given

    @field_validator("optimizer_state")
    @classmethod
    def _is_on_storage(cls, uri: str | None, info: ValidationInfo) -> str | None:
        check_folder(uri)
        if uri is not None and (optimizer := info.data.get("optimizer")) in WITHOUT_FOLDER:
            raise ValueError(f"the states of {optimizer} are not read from a folder; clone the job instead")
        return uri

    @model_validator(mode="after")
    def _one_of_each_pair(self) -> "TrainingSpec":
        if self.gradient_accumulation_steps is not None and self.global_batch_size is not None:
            raise ValueError(
                "gradient_accumulation_steps and global_batch_size are two names for one quantity; remove one"
            )
        ends = [name for name in ("num_train_epochs", "max_steps") if getattr(self, name) is not None]
        if ends and self.max_tokens is not None:
            raise ValueError(f"{', '.join(ends)} and max_tokens each set the end of the run; keep one")
        if self.lr_scheduler_type in ("constant", PLATEAU) and self.warmup_steps:
            raise ValueError(
                f"lr_scheduler_type={self.lr_scheduler_type} has no warm-up, so warmup_steps={self.warmup_steps} has "
                "no effect; choose constant_with_warmup, or remove warmup_steps"
            )
        return self

    @model_validator(mode="after")
    def _auto_keeps_the_global_batch(self) -> "TrainingSpec":
        if self.per_device_train_batch_size != AUTO:
            return self
        if self.global_batch_size is None:
            raise ValueError(
                "per_device_train_batch_size=auto needs the sequences of a step, which it divides into micro-batches; "
                "add global_batch_size"
            )
        if self.reproducible == "any_size":
            raise ValueError(
                "per_device_train_batch_size=auto depends on the memory of the workers, and the bits of a "
                "reproducible=any_size run on the size of micro-batches; write a number"
            )
        return self

    @property
    def micro_batch(self) -> int:
        """The sequences of a micro-batch on a data-parallel rank; 1 as long as the workers have not chosen them."""
        size = self.per_device_train_batch_size
        return size if isinstance(size, int) else 1

    @model_validator(mode="after")
    def _any_size_is_proven(self) -> "TrainingSpec":
        if self.reproducible == "same_size":
            if self.reduction_tree is not None:
                raise ValueError("reduction_tree has no effect with reproducible=same_size; remove one of the two")
            return self
        if self.optimizer in ("adafactor", "adamw_8bit"):
            raise ValueError(
                f"optimizer={self.optimizer} gives other bits on other shards, so reproducible=any_size does not hold; "
                "choose adamw, adam, lion, muon, schedule_free_adamw or sgd, or reproducible=same_size"
            )
        if self.global_batch_size is None:
            raise ValueError(
                "reproducible=any_size needs the same sequences per step at every number of workers; add "
                "global_batch_size"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> "TrainingSpec":
        check_lr(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate)
        if self.max_steps is not None:
            check_steps(self.lr_scheduler_kwargs, warmup_steps=self.warmup_of(self.max_steps), steps=self.max_steps)
        if self.lr_scheduler_kwargs.warmup_lr_rate is not None and not self.warmup_steps:
            raise ValueError("warmup_lr_rate has no effect without a warm-up; add warmup_steps, or remove it")
        if self.lr_scheduler_type == PLATEAU and self.eval_steps is None:
            raise ValueError(
                f"lr_scheduler_type={PLATEAU} lowers the learning rate after evaluations, and there are none; add "
                "data.eval and training.eval_steps"
            )
        return self

    @model_validator(mode="after")
    def _averages_need_no_schedule(self) -> "TrainingSpec":
        if self.optimizer != SCHEDULE_FREE:
            return self
        if self.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            raise ValueError(
                f"optimizer={SCHEDULE_FREE} replaces the schedule lr_scheduler_type={self.lr_scheduler_type} by an "
                "average of the weights; choose constant, or constant_with_warmup with warmup_steps"
            )
        if self.ema_decay is not None:
            raise ValueError(
                f"optimizer={SCHEDULE_FREE} averages the weights itself, and evaluation and export use that; remove "
                f"ema_decay={self.ema_decay}"
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
