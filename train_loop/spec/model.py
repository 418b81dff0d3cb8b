"""`model:` the model to train."""

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, ValidationInfo, field_validator, model_validator

from train_loop.spec.base import SpecModel, only
from train_loop.spec.masked import MASKED_LM, MaskedHeadSpec, MaskedLmSpec, masked_faults

if TYPE_CHECKING:
    from train_loop.spec.data import ColumnsSpec
    from train_loop.spec.job import JobSpec

_HUB = re.compile(r"(?:https?://[^/]+/|hf://)?([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)/?")
"""A model's id or URL on the Hugging Face Hub, with the id as its group."""
Dtype = Literal["bf16", "fp16", "fp32"]

CAUSAL_LM: Literal["causal_lm"] = "causal_lm"

_MOST_LABELS = 10_000
"""An evaluation has three counts per label."""


class ClassesSpec(SpecModel):
    """A head that chooses one of several labels."""

    labels: int = Field(ge=2, le=_MOST_LABELS, description="number of labels: classes 0 to labels - 1")
    names: tuple[Annotated[str, StringConstraints(min_length=1)], ...] | None = Field(
        default=None,
        description="names of the classes, in the order of their numbers; rows may have them instead of numbers, and "
        "exports contain them [default: those of the model's folder]",
    )

    @field_validator("names")
    @classmethod
    def _are_one_per_label(cls, names: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        labels = info.data.get("labels")
        if names is not None and labels is not None and len(names) != labels:
            raise ValueError(f"{len(names)} names for labels={labels}; give one name per label")
        if names is not None and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice!r} is the name of two classes; rename one of them")
        return names


class NumberSpec(SpecModel):
    """A head that gives a number."""

    labels: int = Field(default=1, ge=1, le=1, description="numbers per row; only 1 is supported yet")


class LabelHeadSpec(SpecModel):
    """A head of labels in place of the head of tokens; exactly one of its fields."""

    sequence_classification: ClassesSpec | None = Field(default=None, description="a class for each row")
    token_classification: ClassesSpec | None = Field(default=None, description="a class for each token")
    regression: NumberSpec | None = Field(default=None, description="a number for each row")

    @model_validator(mode="after")
    def _is_one(self) -> "LabelHeadSpec":
        if len([*filter(None, (self.sequence_classification, self.token_classification, self.regression))]) != 1:
            raise ValueError(
                "head names exactly one of sequence_classification, token_classification and regression, for example "
                "head: {sequence_classification: {labels: 2}}"
            )
        return self

    @property
    def name(self) -> str:
        """The name of the head."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def labels(self) -> int:
        """The number of values that the head gives."""
        one: ClassesSpec | NumberSpec = getattr(self, self.name)
        return one.labels

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes; empty without names."""
        one: ClassesSpec | NumberSpec = getattr(self, self.name)
        return (one.names or ()) if isinstance(one, ClassesSpec) else ()

    @property
    def classes(self) -> int | None:
        """The number of classes; None for numbers."""
        return None if self.regression else self.labels

    @property
    def pools(self) -> bool:
        """Whether it gives values for a row, from its last token, and not for each token."""
        return self.token_classification is None


def _kind_of_head(value: Any) -> str:
    if isinstance(value, str):
        return "str"
    is_masked = isinstance(value, MaskedHeadSpec) or (isinstance(value, dict) and "masked_lm" in value)
    return "MaskedHeadSpec" if is_masked else "LabelHeadSpec"


Head = Annotated[
    Annotated[Literal["causal_lm", "masked_lm", "reward", "embedding"], Tag("str")]
    | Annotated[LabelHeadSpec, Tag("LabelHeadSpec")]
    | Annotated[MaskedHeadSpec, Tag("MaskedHeadSpec")],
    Discriminator(_kind_of_head),
]


class LoraSpec(SpecModel):
    """Low-rank adapters on the named modules."""

    r: int = Field(gt=0, description="rank of the adapters")
    alpha: float = Field(gt=0, description="scale of the adapters")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout probability of the adapters")
    target_modules: tuple[str, ...] = Field(description="names of the adapted modules")


class ModelSpec(SpecModel):
    """A Hugging Face decoder: a folder of weights at `path`, or random weights from a `config`.

    With `code` it has neither."""

    path: str | None = Field(
        default=None, description="URI of a Hugging Face model folder (config.json, safetensors) below a storage root"
    )
    config: dict[str, Any] | None = Field(
        default=None, description="Hugging Face config with a model_type; the weights start random"
    )
    tokenizer: str | None = Field(
        default=None,
        description="URI of a Hugging Face tokenizer folder [default: path]; without path, a byte-level BPE of "
        "config.vocab_size tokens is trained on data.train",
    )
    head: Head = Field(
        default=CAUSAL_LM,
        description="head of the model and its loss: causal_lm, masked_lm or {masked_lm: {…}} for encoders, or one of "
        "{sequence_classification: {labels: n}}, {token_classification: {labels: n}}, {regression: {}}",
    )
    dtype: Dtype = Field(default="bf16", description="compute dtype; fp16 uses a gradient scaler")
    master_dtype: Dtype = Field(
        default="fp32", description="dtype of weights, gradients and optimizer states between steps; fp32 or bf16"
    )
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        default="auto",
        description="attention kernel; auto: flash if it is installed and the GPU supports it, else sdpa, or flex "
        "for very long packed samples; families without sdpa use flex on GPUs, or whole matrices of scores",
    )
    gradient_checkpointing: Literal["none", "full", "offload"] = Field(
        default="full",
        description="full: recompute each layer in the backward pass; offload: also keep its input in host memory; "
        "none: keep all activations",
    )
    freeze_module_prefix: tuple[str, ...] = Field(
        default=(), description="prefixes of module names whose parameters are not trained"
    )
    lora: Annotated[LoraSpec | None, only(None)] = Field(
        default=None, description="low-rank adapters; not supported yet"
    )
    compile: bool = Field(
        default=False, description="apply torch.compile to each innermost unit of strategy.wrap_policy"
    )

    @property
    def has_source(self) -> bool:
        """Whether the model comes from a folder or a config; else it is that of own code."""
        return self.path is not None or self.config is not None

    @model_validator(mode="after")
    def _at_most_one_source(self) -> "ModelSpec":
        if self.path is not None and self.config is not None:
            raise ValueError("exactly one of model.path and model.config is needed, and both are given; remove one")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config needs a model_type, for example model_type: qwen3")
        return self

    @property
    def label_head(self) -> LabelHeadSpec | None:
        """The head of labels; None if the model predicts tokens."""
        return self.head if isinstance(self.head, LabelHeadSpec) else None

    @property
    def masked(self) -> MaskedLmSpec | None:
        """The mask of a masked language model; None for other heads."""
        if isinstance(self.head, MaskedHeadSpec):
            return self.head.masked_lm
        return MaskedLmSpec() if self.head == MASKED_LM else None

    @property
    def ends_text(self) -> bool:
        """Whether EOS follows text; heads of labels and masked ones read text as transformers' tokenizers write it."""
        return self.masked is None and self.label_head is None

    @field_validator("head")
    @classmethod
    def _head_is_supported(cls, head: Head) -> Head:
        if isinstance(head, str) and head not in (CAUSAL_LM, MASKED_LM):
            raise ValueError(
                f"{head} is not supported yet; choose causal_lm, masked_lm, sequence_classification, "
                "token_classification or regression"
            )
        return head

    @field_validator("path", "tokenizer")
    @classmethod
    def _is_on_storage(cls, uri: str | None) -> str | None:
        if uri is None or os.path.isabs(uri):
            return uri
        on_hub = _HUB.fullmatch(uri)
        if on_hub is not None:
            folder = f"/models/{on_hub[1].rpartition('/')[2]}"
            raise ValueError(
                f"{uri} is not a folder on shared storage, and models are not downloaded from the Hugging Face Hub; "
                f"run `hf download {on_hub[1]} --local-dir {folder}` below a storage root, and write file://{folder}"
            )
        if "://" not in uri:
            raise ValueError(
                f"{uri} is a relative path, but service and workers have different folders; write an absolute path"
            )
        return uri

    @field_validator("master_dtype")
    @classmethod
    def _master_can_be_unscaled(cls, master: Dtype) -> Dtype:
        if master == "fp16":
            raise ValueError("fp16 holds neither small updates nor scaled gradients; choose fp32 or bf16")
        return master

    @field_validator("attn_implementation")
    @classmethod
    def _flash_has_half_precision(cls, attention: str, info: ValidationInfo) -> str:
        if attention.startswith("flash") and info.data.get("dtype") == "fp32":
            raise ValueError(f"{attention} computes in bf16 or fp16, and dtype is fp32; choose sdpa, or another dtype")
        return attention


def check_head(job: "JobSpec") -> None:
    """Raise ValueError for the first setting that the job's head does not have."""
    for fault in (*masked_faults(job), *_faults(job)):
        raise ValueError(fault)


def _faults(job: "JobSpec") -> Iterator[str]:
    head, data = job.model.label_head, job.data
    for columns in (data.columns_of(source) for source in (*data.sources, *data.eval_sources)):
        yield from _column_faults(columns, head)
    best, known = job.checkpoint.keep_best, _evaluated(job.model)
    if best is not None and best.metric.startswith("eval_") and best.metric not in known and job.code is None:
        name = (MASKED_LM if job.model.masked else CAUSAL_LM) if head is None else head.name
        yield f"model.head={name} has no {best.metric} for keep_best.metric; choose {' or '.join(known)}"
    if head is None:
        return
    if job.code is not None:
        yield f"model.head={head.name} is for models of transformers, and code has its own loss; remove one of the two"
    training, name = job.training, head.name
    without = {
        "training.chunked_loss: true": training.chunked_loss is True,
        "training.z_loss": training.z_loss > 0,
        "training.label_smoothing_factor": training.label_smoothing_factor > 0 and head.classes is None,
        "strategy.wrap_policy.wrap_lm_output": job.strategy.wrap_policy.wrap_lm_output,
    }
    yield from (
        f"{setting} has no meaning for model.head={name}; remove it" for setting, is_set in without.items() if is_set
    )
    if training.reproducible == "any_size":
        yield f"model.head={name} is not proven to give the same bits at every size; choose reproducible: same_size"
    if not head.pools:
        return
    if data.packing:
        yield f"model.head={name} has one document per row; set data.packing: false"
    if data.on_long_rows == "split":
        yield f"model.head={name} has one label per row, which cannot be split; choose on_long_rows: truncate"
    if job.strategy.ulysses_size > 1:
        yield f"model.head={name} reads a row's last token, which only one part of a sequence has; set ulysses_size: 1"


def _evaluated(model: ModelSpec) -> tuple[str, ...]:
    """Return the metrics of an evaluation that checkpoints can be compared by."""
    head = model.label_head
    if head is None:
        return ("eval_loss", "eval_perplexity", *(["eval_accuracy"] if model.masked else []))
    return ("eval_loss", "eval_mse") if head.classes is None else ("eval_loss", "eval_accuracy", "eval_f1")


def _column_faults(columns: "ColumnsSpec", head: LabelHeadSpec | None) -> Iterator[str]:
    """Yield the faults of a source's columns for a head."""
    if head is None or not head.pools:
        if columns.label is not None:
            yield (
                "columns.label goes with model.head: {sequence_classification: …} or {regression: …}; set the head, or "
                "remove label"
            )
    elif columns.label is None or columns.labels is not None or columns.weight is not None:
        yield f"model.head={head.name} needs columns.label, with text or input_ids, without labels and weight"
    if head is not None and not head.pools and (columns.labels is None or columns.weight is not None):
        yield f"model.head={head.name} needs columns.input_ids and columns.labels, a class per token, without weight"
