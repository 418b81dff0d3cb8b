"""`model.head:` what the model gives for a row, and the settings that go with it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from train_loop.spec.base import SpecModel

if TYPE_CHECKING:
    from train_loop.spec.data import ColumnsSpec
    from train_loop.spec.job import JobSpec

CAUSAL_LM: Literal["causal_lm"] = "causal_lm"

_MOST_LABELS = 10_000
"""An evaluation has three counts per label."""


class ClassesSpec(SpecModel):
    """A head that chooses one of several labels."""

    labels: int = Field(ge=2, le=_MOST_LABELS, description="number of labels: classes 0 to labels - 1")


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
    def classes(self) -> int | None:
        """The number of classes; None for numbers."""
        return None if self.regression else self.labels

    @property
    def pools(self) -> bool:
        """Whether it gives values for a row, from its last token, and not for each token."""
        return self.token_classification is None


def _is_label_head(value: Any) -> str:
    return "str" if isinstance(value, str) else "LabelHeadSpec"


Head = Annotated[
    Annotated[Literal["causal_lm", "masked_lm", "reward", "embedding"], Tag("str")]
    | Annotated[LabelHeadSpec, Tag("LabelHeadSpec")],
    Discriminator(_is_label_head),
]


def check_head(job: "JobSpec") -> None:
    """Raise ValueError for the first setting that the job's head does not have."""
    for fault in _faults(job):
        raise ValueError(fault)


def _faults(job: "JobSpec") -> Iterator[str]:
    head, data = job.model.label_head, job.data
    for columns in (data.columns_of(source) for source in (*data.sources, *data.eval_sources)):
        yield from _column_faults(columns, head)
    best, known = job.checkpoint.keep_best, _evaluated(head)
    if best is not None and best.metric.startswith("eval_") and best.metric not in known:
        name = CAUSAL_LM if head is None else head.name
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


def _evaluated(head: LabelHeadSpec | None) -> tuple[str, ...]:
    """Return the metrics of an evaluation that checkpoints can be compared by."""
    if head is None:
        return ("eval_loss", "eval_perplexity")
    return ("eval_loss", "eval_mse") if head.classes is None else ("eval_loss", "eval_accuracy", "eval_f1")


def _column_faults(columns: "ColumnsSpec", head: LabelHeadSpec | None) -> Iterator[str]:
    """Yield what is wrong with the columns of a source for a head."""
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
