"""The whole job spec."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from train_loop.spec.agreement.strategy import check_strategy
from train_loop.spec.base import SpecModel, only
from train_loop.spec.checkpoint import CheckpointSpec
from train_loop.spec.code import CodeSpec, check_part
from train_loop.spec.data import Chats, DataSpec
from train_loop.spec.heads import check_head
from train_loop.spec.kinds.outputs import InferSpec
from train_loop.spec.model import ModelSpec
from train_loop.spec.optimizer import SCHEDULE_FREE
from train_loop.spec.scaling import FailureSpec, ScalingSpec
from train_loop.spec.strategy import StrategySpec
from train_loop.spec.training import ReductionTreeSpec, TrainingSpec


def _power_of_two(size: int) -> int:
    """Return the largest power of two that is at most `size`, and at least 1."""
    return 1 << (max(size, 1).bit_length() - 1)


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
# The service rejects control characters in submitted labels; stored specs may hold some.
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
LabelValue = Annotated[str, StringConstraints(max_length=512)]
Priority = Annotated[
    int, Field(ge=-1000, le=1000, description="priority in the queue, from -1000 to 1000; higher starts first")
]
Labels = Annotated[
    dict[LabelKey, LabelValue],
    Field(
        max_length=16,
        description="labels for filters and lists: at most 16, keys of 1 to 64 characters, values of at most 512",
    ),
]


class JobSpec(SpecModel):
    """The spec of one training job."""

    name: Name = Field(description="name of the job: lower-case letters, digits and hyphens, at most 40 characters")
    kind: Literal["train"] = Field(
        default="train", description="kind of the job: train, or infer, which has its own fields"
    )
    project: Name = Field(
        default="default",
        description="project of the job: lower-case letters, digits and hyphens, at most 40 characters",
    )
    priority: Priority = 0
    labels: Labels = Field(default={})
    code: CodeSpec | None = Field(
        default=None, description="model, loss and batches by your own code, in projects whose operator allows it"
    )
    model: ModelSpec = Field(
        default=ModelSpec(), validate_default=True, description="the model to train; optional with code"
    )
    data: DataSpec = Field(description="the training and evaluation data")
    training: TrainingSpec = Field(description="optimizer, schedule, batch size and length of the run")
    infer: Annotated[InferSpec | None, only(None)] = Field(
        default=None, description="outputs of a job of kind: infer, which alone has them"
    )
    strategy: StrategySpec = Field(
        default=StrategySpec(), description="sharding over the workers: FSDP2, Ulysses and tensor parallelism"
    )
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="schedule and retention of checkpoints")
    scaling: ScalingSpec = Field(default=ScalingSpec(), description="number of workers and their resources")
    failure: FailureSpec = Field(default=FailureSpec(), description="limits on failures and restarts")

    @property
    def run(self) -> "JobSpec":
        """The run of the job, as the loop and the plan read it: the spec itself."""
        return self

    @property
    def trains(self) -> bool:
        """True: gradients are computed."""
        return True

    @property
    def checkpoint_source(self) -> None:
        """None: a run starts from a job's checkpoint as its clone."""
        return

    def with_model_of(self, job: str, step: int, run: "JobSpec", tokenizer: str | None) -> "JobSpec":
        """Return the spec itself, which names its own model."""
        return self

    @property
    def unit(self) -> str:
        """The unit of progress: optimizer steps."""
        return "step"

    @property
    def batch_field(self) -> str:
        """The field with the rows of a call of the model, by which memory can be saved."""
        return "training.per_device_train_batch_size"

    @property
    def resizable(self) -> bool:
        """True if the number of workers may change without a change of the steps."""
        return self.training.global_batch_size is not None

    @property
    def trains_tokenizer(self) -> bool:
        """True if a tokenizer is trained on the data, because the spec names none."""
        return self.data.reads_text and self.model.tokenizer is None and self.model.path is None

    @property
    def sequences_per_device(self) -> int:
        """The sequences of a micro-batch; a sample of pairs has two."""
        return self.training.micro_batch * self.data.sequences

    @property
    def chats(self) -> Chats:
        """The tokens of conversations."""
        if self.infer is None:
            return "trained"
        return "prompt" if self.infer.output == "generate" else "whole"

    @property
    def positions(self) -> int:
        """The positions of a sequence at most: those of a sample, and of tokens that are generated after it."""
        return self.data.sequence_length + (0 if self.infer is None else self.infer.new_tokens)

    def at(self, workers: int) -> "JobSpec":
        """Return the spec with a chosen number of workers."""
        return self.scaled(self.scaling.at(workers))

    def scaled(self, scaling: ScalingSpec) -> "JobSpec":
        """Return the spec of the same run with another scaling; its reduction tree stays the same."""
        return self.model_copy(update={"scaling": scaling, "training": self._with_tree()})

    @property
    def reduction_tree(self) -> ReductionTreeSpec | None:
        """The reduction tree of an `any_size` run: the given one, or that of its largest mesh; otherwise None."""
        if self.training.reproducible == "same_size" or self.training.reduction_tree is not None:
            return self.training.reduction_tree
        strategy, most = self.strategy, self.scaling.bounds[1]
        if strategy.sharding_strategy == "NO_SHARD":
            return ReductionTreeSpec(max_shards=1, max_replicas=_power_of_two(most // strategy.ulysses_size))
        fsdp = most if strategy.shards <= 1 or strategy.shards >= most else strategy.shards
        return ReductionTreeSpec(
            max_shards=_power_of_two(fsdp // strategy.ulysses_size), max_replicas=_power_of_two(most // fsdp)
        )

    def _with_tree(self) -> TrainingSpec:
        return self.training.model_copy(update={"reduction_tree": self.reduction_tree})

    def at_any_size(self) -> "JobSpec":
        """Return the spec without the fields that may change on resume.

        These are the fields of its size, if the global batch does not depend on it, float8, and whether embeddings and
        head are FSDP units, whose default has changed.
        """
        strategy = self.strategy.with_any_ends.model_copy(update={"float8": None})
        if not self.resizable:
            return self.model_copy(update={"strategy": strategy})
        if self.training.reproducible == "any_size":
            strategy = strategy.model_copy(update={"fsdp_size": 0})
            return self.scaled(ScalingSpec()).model_copy(update={"strategy": strategy})
        return self.model_copy(
            update={
                "scaling": ScalingSpec(),
                "strategy": strategy.over_all_workers,
                "training": self.training.model_copy(update={"per_device_train_batch_size": 1}),
            }
        )

    @model_validator(mode="after")
    def _tokenizer_has_text(self) -> "JobSpec":
        # The tokenizer of a masked language model also names the tokens of its mask.
        if self.model.tokenizer is not None and not self.data.reads_text and self.model.masked is None:
            raise ValueError(
                "model.tokenizer has no effect, because columns.input_ids names rows that are tokenised already; "
                "remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _head_has_its_data(self) -> "JobSpec":
        check_head(self)
        return self

    @model_validator(mode="after")
    def _conversations_have_a_template(self) -> "JobSpec":
        data, model = self.data, self.model
        shapes = [data.columns_of(source) for source in (*data.sources, *data.eval_sources)]
        if any(shape.messages for shape in shapes) and model.tokenizer is None and model.path is None:
            raise ValueError(
                "columns.messages needs a chat template, but a tokenizer that is trained on the data has none; name "
                "a tokenizer in model.tokenizer"
            )
        return self

    @model_validator(mode="after")
    def _tokens_are_of_one_tokenizer(self) -> "JobSpec":
        data, model = self.data, self.model
        shapes = [data.columns_of(source) for source in (*data.sources, *data.eval_sources)]
        mixed = data.reads_text and any(shape.tokenised for shape in shapes)
        if mixed and model.tokenizer is None and model.path is None:
            raise ValueError(
                "columns.input_ids names tokenised rows, but the text of other sources would get another tokenizer; "
                "name the tokenizer of these rows in model.tokenizer"
            )
        return self

    @field_validator("infer", mode="before")
    @classmethod
    def _infers_nothing(cls, infer: object) -> object:
        if infer is not None:
            raise ValueError("infer goes with kind: infer; set kind: infer, or remove infer")
        return infer

    @field_validator("model", "data", "training", "strategy", "checkpoint")
    @classmethod
    def _fits_code(cls, part: SpecModel, info: ValidationInfo) -> SpecModel:
        if info.data.get("code") is not None:
            check_part(info.data["code"], part)
        elif isinstance(part, DataSpec) and "code" in info.data and part.has_own_columns:
            raise ValueError("columns.own goes with own code (code); add code, or name the role of each column")
        return part

    @field_validator("model")
    @classmethod
    def _has_a_source(cls, model: ModelSpec, info: ValidationInfo) -> ModelSpec:
        if not model.has_source and info.data.get("code", ...) is None:
            raise ValueError(
                "exactly one of model.path, model.config and code is needed, and none is given; add one of them"
            )
        return model

    @field_validator("training")
    @classmethod
    def _optimizer_state_has_its_weights(cls, training: TrainingSpec, info: ValidationInfo) -> TrainingSpec:
        model = info.data.get("model")
        if training.optimizer_state is not None and model is not None and model.path is None:
            raise ValueError(
                "optimizer_state belongs to the weights of the same checkpoint; set model.path to their folder, or "
                "remove optimizer_state"
            )
        return training

    @field_validator("training")
    @classmethod
    def _evaluates_something(cls, training: TrainingSpec, info: ValidationInfo) -> TrainingSpec:
        data = info.data.get("data")
        if data is None or (data.eval is None) == (training.eval_steps is None):
            return training
        if data.eval is None:
            raise ValueError(f"eval_steps={training.eval_steps} needs eval data; add data.eval, or remove eval_steps")
        raise ValueError("data.eval is set, but eval_steps is not; add eval_steps, or remove data.eval")

    @field_validator("training")
    @classmethod
    def _average_keeps_small_moves(cls, training: TrainingSpec, info: ValidationInfo) -> TrainingSpec:
        model = info.data.get("model")
        # Adapters are fp32, whatever the frozen weights are.
        if model is None or model.lora is not None or model.adapter is not None:
            return training
        if training.optimizer == SCHEDULE_FREE and model.master_dtype != "fp32":
            raise ValueError(
                f"optimizer={SCHEDULE_FREE} moves its average by 1 / steps, which model.master_dtype="
                f"{model.master_dtype} rounds away; choose master_dtype: fp32"
            )
        return training

    @field_validator("scaling")
    @classmethod
    def _elastic_steps_stay_the_same(cls, scaling: ScalingSpec, info: ValidationInfo) -> ScalingSpec:
        training = info.data.get("training")
        if training is not None and scaling.elastic and training.global_batch_size is None:
            raise ValueError(
                "num_workers is a range, so the sequences per step would change with the number of workers; add "
                "training.global_batch_size"
            )
        return scaling

    @field_validator("checkpoint")
    @classmethod
    def _best_is_measured(cls, checkpoint: CheckpointSpec, info: ValidationInfo) -> CheckpointSpec:
        training, best = info.data.get("training"), checkpoint.keep_best
        if training is None or best is None or not best.metric.startswith("eval_"):
            return checkpoint
        if training.eval_steps is None:
            raise ValueError(f"keep_best.metric={best.metric} needs evaluations; add data.eval and training.eval_steps")
        if checkpoint.every_steps is None or checkpoint.every_steps % training.eval_steps:
            raise ValueError(
                f"keep_best.metric={best.metric} compares evaluated checkpoints, but every_steps="
                f"{checkpoint.every_steps} is not a multiple of eval_steps={training.eval_steps}; choose a multiple"
            )
        return checkpoint

    @field_validator("strategy")
    @classmethod
    def _goes_with_the_other_parts(cls, strategy: StrategySpec, info: ValidationInfo) -> StrategySpec:
        check_strategy(strategy, info.data)
        return strategy
