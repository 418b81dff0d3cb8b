"""The spec of a job of `kind: infer`: it computes outputs of a model for each row, and trains nothing."""

from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import to_json

from train_loop.spec.agreement.adapters import lora_faults
from train_loop.spec.agreement.strategy import expert_faults, tensor_faults
from train_loop.spec.base import SpecModel, is_default, only
from train_loop.spec.checkpoint import CheckpointSpec
from train_loop.spec.data import ColumnsSpec, DataSpec, LongRows, Sources
from train_loop.spec.heads import CAUSAL_LM, EmbeddingSpec, LabelHeadSpec
from train_loop.spec.job import JobSpec, Labels, Name, Priority
from train_loop.spec.kinds.model import CheckpointSource, model_of_job
from train_loop.spec.kinds.outputs import InferSpec
from train_loop.spec.model import ModelSpec
from train_loop.spec.scaling import FailureSpec, ScalingSpec
from train_loop.spec.strategy import StrategySpec
from train_loop.spec.training import TrainingSpec

_MODEL = (
    *("path", "config", "job", "step", "weights", "tokenizer", "head"),
    *("dtype", "attn_implementation", "experts_implementation", "adapter"),
)
_STRATEGY = (
    *("sharding_strategy", "fsdp_size", "ulysses_size", "param_dtype", "output_dtype", "norm_dtype", "wrap_policy"),
    *("reshard_after_forward", "forward_prefetch", "apply_tiled_mlp", "tiled_num_shards", "matmul_precision"),
    *("tp_size", "ep_size", "apply_expert_patch"),
)
_COLUMNS = ("text", "input_ids", "messages", "tools")
_RESULTS = (
    *("row", "tokens", "logprobs", "perplexity", "embedding"),
    *("generated", "generated_tokens", "generated_logprobs", "finish_reason"),
)
"""Columns of results, in addition to those of the rows."""


class InferModelSpec(ModelSpec):
    """The model of an inference job. Its weights are held in `dtype`."""

    job: str | None = Field(
        default=None,
        max_length=64,
        exclude_if=is_default(None),
        description="id of a training job whose checkpoint has the weights, in place of path or config; its model, "
        "tokenizer and head are used",
    )
    step: Annotated[int, Field(ge=0)] | Literal["latest"] = Field(
        default="latest",
        exclude_if=is_default("latest"),
        description="step of the checkpoint; latest: the newest one at submission",
    )
    weights: Literal["model", "ema"] = Field(
        default="model",
        exclude_if=is_default("model"),
        description="weights of the checkpoint; ema: their average, which training.ema_decay of the job has made",
    )

    @field_validator("step", mode="before")
    @classmethod
    def _is_a_step(cls, step: Any) -> Any:
        if step != "latest" and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ValueError(f"invalid step {to_json(step).decode():.100}; expected a number from 0, or latest")
        return step

    @property
    def is_of_job(self) -> bool:
        """True if a job's checkpoint has the weights."""
        return self.job is not None

    @property
    def ends_text(self) -> bool:
        """False: text has the tokens that transformers' tokenizer gives it, without another EOS."""
        return False

    @model_validator(mode="after")
    def _is_honoured(self) -> "InferModelSpec":
        if self.is_of_job and self.adapter is not None:
            raise ValueError("adapter contradicts job, whose checkpoint has the weights; remove one of them")
        adapted = ("lora", "quantize_base") if self.is_of_job or self.adapter is not None else ()
        # Nothing is recomputed, as this setting says.
        plain = ("gradient_checkpointing",) if self.gradient_checkpointing == "none" else ()
        used = (*_MODEL, *adapted, *plain, "router_dtype")
        for fault in _unused(self, used, "with kind: infer, which trains nothing"):
            raise ValueError(fault)
        for name, value, default in (("step", self.step, "latest"), ("weights", self.weights, "model")):
            if self.job is None and value != default:
                raise ValueError(f"{name}={value} has no effect without model.job, whose checkpoint it names; add job")
        if self.dtype == "fp16":
            raise ValueError("dtype=fp16 is not supported with kind: infer; choose bf16 or fp32")
        return self


class InferDataSpec(DataSpec):
    """The rows of an inference job: row i of the files in name order has the id i in the results."""

    eval: Annotated[Sources | None, only(None)] = Field(
        default=None, description="held-out rows belong to training; null"
    )
    on_bad_rows: Annotated[Literal["fail", "skip"], only("fail")] = Field(
        default="fail", description="invalid rows fail the job: each row has results"
    )
    on_long_rows: Annotated[LongRows | None, only("fail", "truncate", "truncate_left")] = Field(
        default="fail",
        description="rows longer than sequence_length; truncate keeps their start, truncate_left their end",
    )
    packing: Annotated[bool, only(False)] = Field(default=False, description="rows are never packed")
    shuffle: Annotated[bool, only(False)] = Field(default=False, description="results have the order of the rows")
    seed: Annotated[int, only(0)] = Field(default=0, description="the order is that of the rows; 0")

    @model_validator(mode="after")
    def _is_supported(self) -> "InferDataSpec":
        for source in self.sources:
            columns = self.columns_of(source)
            for fault in _unused(
                columns, _COLUMNS, "with kind: infer; name columns.text, columns.messages or columns.input_ids"
            ):
                raise ValueError(f"columns.{fault}")
            for name in set(columns.names).intersection(_RESULTS):
                raise ValueError(f"column {name!r} has the name of a column of the results; rename it in the files")
            if source.weight is not None:
                raise ValueError("weight has no effect with kind: infer, which reads each row once; remove it")
        return self

    def drops_untrained(self, columns: ColumnsSpec) -> bool:
        """Return False: nothing is trained, and each row has results."""
        return False

    @property
    def has_messages(self) -> bool:
        """True if rows have conversations."""
        return any(self.columns_of(source).messages for source in self.sources)


class InferJobSpec(SpecModel):
    """The spec of an inference job."""

    name: Name = Field(description="name of the job: lower-case letters, digits and hyphens, at most 40 characters")
    kind: Literal["infer"] = Field(description="kind of the job")
    project: Name = Field(
        default="default",
        description="project of the job: lower-case letters, digits and hyphens, at most 40 characters",
    )
    priority: Priority = 0
    labels: Labels = Field(default={})
    model: InferModelSpec = Field(description="the model, and the head that gives embeddings")
    data: InferDataSpec = Field(description="the rows, in data.train")
    infer: InferSpec = Field(default=InferSpec(), description="the outputs for each row")
    strategy: StrategySpec = Field(
        default=StrategySpec(),
        description="sharding over the workers: FSDP2, HSDP, Ulysses, and shared layers or experts",
    )
    scaling: ScalingSpec = Field(default=ScalingSpec(), description="number of workers and their resources")
    failure: FailureSpec = Field(default=FailureSpec(), description="limits on failures and restarts")

    @property
    def code(self) -> None:
        """None: own code is not supported."""
        return

    @property
    def run(self) -> JobSpec:
        """Return the run that has the job's model, rows and mesh, as the loop and the plan read them.

        Its optimizer and schedule have no effect, because nothing is trained.
        """
        model = self.model.model_copy(update={"master_dtype": self.model.dtype, "gradient_checkpointing": "none"})
        if self.infer.output == "embeddings" and model.head == CAUSAL_LM:
            model = model.model_copy(update={"head": LabelHeadSpec(embedding=EmbeddingSpec())})
        # Rules of training do not apply, such as columns of pairs for embeddings.
        return JobSpec.model_construct(
            **{name: getattr(self, name) for name in ("name", "project", "priority", "labels", "strategy")},
            model=model,
            data=self.data,
            infer=self.infer,
            training=TrainingSpec(
                learning_rate=1.0, per_device_train_batch_size=self.infer.batch_size, chunked_loss=False
            ),
            checkpoint=CheckpointSpec(every_steps=None, save_final=False),
            scaling=self.scaling,
            failure=self.failure,
        )

    @property
    def trains(self) -> bool:
        """False: only the forward pass is computed."""
        return False

    @property
    def checkpoint_source(self) -> CheckpointSource | None:
        """The checkpoint that has the weights; None if a folder or a config gives them."""
        model = self.model
        return None if model.job is None else CheckpointSource(model.job, model.step, model.weights)

    def with_model_of(self, job: str, step: int, run: JobSpec, tokenizer: str | None) -> "InferJobSpec":
        """Return the spec with the model of a job, whose checkpoint of a step has the weights.

        `tokenizer` is the one that was trained on the job's data, if its spec names none. Conversations get the chat
        template of the job unless the spec names one. Raises SpecError.
        """
        data, theirs = self.data, model_of_job(self.model, job, run.model, tokenizer, reads_text=self.data.reads_text)
        if data.has_messages and data.chat_template is None:
            data = data.model_copy(update={"chat_template": run.data.chat_template})
        return self.model_copy(update={"model": self.model.model_copy(update={**theirs, "step": step}), "data": data})

    @property
    def unit(self) -> str:
        """The unit of progress: rows with results."""
        return "row"

    @property
    def batch_field(self) -> str:
        """The field with the rows of a call of the model, by which memory can be saved."""
        return "infer.batch_size"

    @property
    def resizable(self) -> bool:
        """True: the results of a row do not depend on the number of workers."""
        return True

    def at(self, workers: int) -> "InferJobSpec":
        """Return the spec with a chosen number of workers."""
        return self.scaled(self.scaling.at(workers))

    def scaled(self, scaling: ScalingSpec) -> "InferJobSpec":
        """Return the spec with another scaling."""
        return self.model_copy(update={"scaling": scaling})

    def at_any_size(self) -> "InferJobSpec":
        """Return the spec without the fields that may change on resume."""
        return self.model_copy(
            update={
                "scaling": ScalingSpec(),
                "strategy": self.strategy.over_all_workers,
                "infer": self.infer.model_copy(update={"batch_size": 1}),
            }
        )

    @model_validator(mode="after")
    def _is_honoured(self) -> "InferJobSpec":
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        model, strategy, output = self.model, self.strategy, self.infer.output
        for fault in _unused(strategy, _STRATEGY, "with kind: infer"):
            yield f"strategy.{fault}"
        if model.dtype != strategy.param_dtype:
            yield (
                f"param_dtype={strategy.param_dtype} contradicts model.dtype={model.dtype}; remove one or make them "
                "equal"
            )
        if not model.has_source and not model.is_of_job:
            yield "exactly one of model.path, model.config and model.job is needed, and none is given; add one of them"
        if model.tokenizer is not None and not self.data.reads_text:
            yield "model.tokenizer has no effect, because columns.input_ids names rows that are tokenised already"
        yield from self._head_faults()
        parts = {"model": model}
        rules = (tensor_faults, expert_faults, lora_faults)
        yield from (one.message for rule in rules for one in rule(strategy, parts))
        for name, size in (("tp_size", strategy.tp_size), ("ep_size", strategy.ep_size)):
            if output == "embeddings" and size > 1:
                yield f"strategy.{name}={size} is not supported with output: embeddings; remove {name}"
        if output == "embeddings" and self.data.has_messages:
            yield "output: embeddings reads texts, and columns.messages names conversations; name columns.text"
        if output == "generate":
            yield from self._generation_faults()

    def _generation_faults(self) -> Iterator[str]:
        if self.model.attn_implementation == "flex_attention":
            yield "attn_implementation=flex_attention is not proven with output: generate; choose sdpa or auto"
        if self.data.has_messages and self.data.on_long_rows == "truncate":
            yield (
                "on_long_rows: truncate cuts the end of a conversation, which asks for the answer; choose "
                "truncate_left or fail"
            )
        if self.infer.generation.stop and not self.data.reads_text:
            yield (
                "infer.generation.stop needs text, and columns.input_ids names rows that are tokenised already; use "
                "stop_tokens"
            )

    def _head_faults(self) -> Iterator[str]:
        head, output = self.model.head, self.infer.output
        is_embedding = isinstance(head, LabelHeadSpec) and head.embedding is not None
        if head != CAUSAL_LM and not is_embedding:
            yield "model.head is not supported with kind: infer; choose causal_lm or embedding"
        elif is_embedding and output != "embeddings":
            yield f"model.head: embedding gives no output: {output}; choose output: embeddings, or head: causal_lm"
        elif isinstance(head, LabelHeadSpec) and head.embedding is not None:
            for fault in _unused(head.embedding, ("pooling", "normalize"), "with kind: infer, which trains nothing"):
                yield f"model.head.embedding.{fault}"


def _unused(part: SpecModel, used: Collection[str], why: str) -> Iterator[str]:
    """Yield a fault for each field with another value than its default that is not among the used ones."""
    for name, field in type(part).model_fields.items():
        value: Any = getattr(part, name)
        if name not in used and value != field.get_default(call_default_factory=True):
            yield f"{name}={to_json(value).decode():.100} is not supported {why}; remove {name}"
