"""`model.head:` the heads of models, and the settings that go with them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, ValidationInfo, field_validator, model_validator

from train_loop.spec.base import SpecModel
from train_loop.spec.masked import MASKED_LM, MaskedHeadSpec, masked_faults

if TYPE_CHECKING:
    from train_loop.spec.data import ColumnsSpec
    from train_loop.spec.job import JobSpec

CAUSAL_LM: Literal["causal_lm"] = "causal_lm"
Pooling = Literal["last_token", "mean", "cls"]

_MOST_LABELS = 10_000
"""An evaluation has three counts per label."""


class ClassesSpec(SpecModel):
    """A head that chooses one of several labels."""

    metrics: ClassVar = ("eval_accuracy", "eval_f1")
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

    metrics: ClassVar = ("eval_mse",)
    labels: int = Field(default=1, ge=1, le=1, description="numbers per row; only 1 is supported yet")


class RewardSpec(SpecModel):
    """A head that gives a reward for a row, trained with pairs of a chosen and a rejected one."""

    columns: ClassVar = ("chosen", "rejected")
    metrics: ClassVar = ("eval_accuracy", "eval_reward_margin")
    labels: ClassVar = 1
    center_rewards_coefficient: float = Field(
        default=0.0, ge=0, le=1e6, description="factor of the squared sum of both rewards in the loss; 0 without it"
    )


class EmbeddingSpec(SpecModel):
    """Embeddings of texts in place of a head, trained with anchors and texts that belong to them."""

    columns: ClassVar = ("anchor", "positive")
    metrics: ClassVar = ("eval_recall_at_1", "eval_recall_at_5")
    labels: ClassVar = 0
    pooling: Pooling | None = Field(
        default=None,
        description="embedding of a text from the states of its tokens; cls: the first one's; null: as the model's "
        "folder of sentence-transformers has it, else last_token",
    )
    normalize: bool | None = Field(
        default=None,
        description="divide embeddings by their norms, so that scores are cosines; null: as the model's folder of "
        "sentence-transformers does, else true",
    )
    temperature: float = Field(default=0.05, gt=0, description="divisor of the scores in the loss")
    group: int = Field(
        default=8,
        ge=1,
        description="consecutive samples of a step whose texts are each other's negatives; must divide "
        "training.per_device_train_batch_size",
    )


class LabelHeadSpec(SpecModel):
    """A head of labels in place of the head of tokens; exactly one of its fields."""

    sequence_classification: ClassesSpec | None = Field(default=None, description="a class for each row")
    token_classification: ClassesSpec | None = Field(default=None, description="a class for each token")
    regression: NumberSpec | None = Field(default=None, description="a number for each row")
    reward: RewardSpec | None = Field(
        default=None, description="a reward for each of two rows, of which one is better; also head: reward"
    )
    embedding: EmbeddingSpec | None = Field(
        default=None, description="an embedding for each of several texts that belong together; also head: embedding"
    )

    @model_validator(mode="after")
    def _is_one(self) -> "LabelHeadSpec":
        names = list(type(self).model_fields)
        if sum(getattr(self, name) is not None for name in names) != 1:
            raise ValueError(
                f"head names exactly one of {', '.join(names[:-1])} and {names[-1]}, for example "
                "head: {sequence_classification: {labels: 2}}"
            )
        return self

    @property
    def name(self) -> str:
        """The name of the head."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def settings(self) -> ClassesSpec | NumberSpec | RewardSpec | EmbeddingSpec:
        """The settings of the head."""
        found: ClassesSpec | NumberSpec | RewardSpec | EmbeddingSpec = getattr(self, self.name)
        return found

    @property
    def labels(self) -> int:
        """The number of values that the head gives; 0 for embeddings, which have no head."""
        return self.settings.labels

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes; empty without names."""
        return (self.settings.names or ()) if isinstance(self.settings, ClassesSpec) else ()

    @property
    def classes(self) -> int | None:
        """The number of classes; None for numbers."""
        return self.labels if isinstance(self.settings, ClassesSpec) else None

    @property
    def pools(self) -> bool:
        """True if it gives values for a row, usually from its last token, and not for each token."""
        return self.token_classification is None


WITH_DEFAULTS: dict[str, type[RewardSpec] | type[EmbeddingSpec]] = {"reward": RewardSpec, "embedding": EmbeddingSpec}
"""Heads of pairs, which a spec may name without settings."""


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


def check_head(job: "JobSpec") -> None:
    """Raise ValueError for the first setting that the job's head does not have."""
    for fault in (*masked_faults(job), *_faults(job)):
        raise ValueError(fault)


def _faults(job: "JobSpec") -> Iterator[str]:
    head, data = job.model.label_head, job.data
    for columns in (data.columns_of(source) for source in (*data.sources, *data.eval_sources)):
        yield from _column_faults(columns, head)
    best, known = job.checkpoint.keep_best, _evaluated(job)
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
        yield f"model.head={name} has one result per row, which cannot be split; choose on_long_rows: truncate"
    if job.strategy.ulysses_size > 1:
        yield f"model.head={name} has one result per row, and ranks would see parts of a row; set ulysses_size: 1"
    if head.embedding is not None:
        yield from _group_faults(job, head.embedding)


def _group_faults(job: "JobSpec", head: EmbeddingSpec) -> Iterator[str]:
    """Yield the faults of the groups of an embedding's loss."""
    size, data, given = job.training.micro_batch, job.data, job.training.per_device_train_batch_size
    if size % head.group:
        yield (
            f"model.head.embedding.group={head.group} does not divide per_device_train_batch_size={given}, and a group "
            f"lies in one micro-batch; set per_device_train_batch_size: {-(-size // head.group) * head.group}, or "
            "another group"
        )
    if len({len(data.columns_of(source).sequences) for source in (*data.sources, *data.eval_sources)}) > 1:
        yield "model.head=embedding needs as many columns.negatives in each source; name as many, or none"


def _evaluated(job: "JobSpec") -> tuple[str, ...]:
    """Return the metrics of an evaluation that checkpoints can be compared by."""
    head = job.model.label_head
    if head is None:
        return ("eval_loss", "eval_perplexity", *(["eval_accuracy"] if job.model.masked else []))
    return ("eval_loss", *head.settings.metrics)


def _column_faults(columns: "ColumnsSpec", head: LabelHeadSpec | None) -> Iterator[str]:
    """Yield the faults of a source's columns for a head."""
    name = None if head is None else head.name
    for own, kind in WITH_DEFAULTS.items():
        first, second = kind.columns
        is_named = getattr(columns, first) is not None
        if name == own and not is_named:
            yield f"model.head={own} needs columns.{first} and columns.{second}; name both, or choose another head"
        if name != own and is_named:
            yield f"columns.{first} and columns.{second} go with model.head: {own}; set the head, or remove them"
    if name in WITH_DEFAULTS:
        return
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
