"""The head of masked language models in `model:`, its mask and the settings that it does not have."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from train_loop.spec.base import SpecModel

if TYPE_CHECKING:
    from train_loop.spec.job import JobSpec

MASKED_LM: Literal["masked_lm"] = "masked_lm"


class MaskedLmSpec(SpecModel):
    """The mask of a masked language model, by the rule of BERT (Devlin et al., 2018)."""

    probability: float = Field(default=0.15, gt=0, le=1, description="probability of a token to be masked")
    mask_replace_prob: float = Field(
        default=0.8, ge=0, le=1, description="share of the masked tokens that the mask token replaces"
    )
    random_replace_prob: float = Field(
        default=0.1, ge=0, le=1, description="share that random tokens replace; the rest stays"
    )
    mask_token: int | None = Field(
        default=None, ge=0, description="id of the mask token [default: mask_token of the tokenizer]"
    )
    special_tokens: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        description="ids of tokens that are never masked, in addition to the special tokens of the tokenizer",
    )

    @model_validator(mode="after")
    def _shares_are_of_one(self) -> "MaskedLmSpec":
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"mask_replace_prob={self.mask_replace_prob:g} and random_replace_prob={self.random_replace_prob:g} "
                "are shares of the masked tokens, and together more than 1; lower one of them"
            )
        return self


class MaskedHeadSpec(SpecModel):
    """The head of a masked language model, with the settings of its mask."""

    masked_lm: MaskedLmSpec = Field(
        default=MaskedLmSpec(), description="a masked language model, with the settings of its mask"
    )


def masked_faults(job: "JobSpec") -> Iterator[str]:
    """Yield the settings of a job that a masked language model does not have."""
    model, data, training = job.model, job.data, job.training
    mask = model.masked
    if mask is None:
        return
    if job.code is not None:
        yield "model.head=masked_lm is for models of transformers, and code has its own loss; remove one of the two"
    for columns in map(data.columns_of, (*data.sources, *data.eval_sources)):
        others = {"labels": columns.labels, "label": columns.label, "weight": columns.weight}
        if columns.text is None and columns.input_ids is None:
            yield "model.head=masked_lm needs columns.text or columns.input_ids; name one of them"
        for name, column in others.items():
            if column is not None:
                yield f"model.head=masked_lm predicts the masked tokens themselves; remove columns.{name}"
    if data.packing:
        yield "model.head=masked_lm attends to the whole row, which must be one document; set data.packing: false"
    if job.strategy.ulysses_size > 1:
        yield "model.head=masked_lm attends to the whole row, which Ulysses would split; set ulysses_size: 1"
    if training.reproducible == "any_size":
        yield "model.head=masked_lm is not proven to give the same bits at every size; choose reproducible: same_size"
    if (mask.mask_token is None or mask.special_tokens is None) and not (
        data.reads_text or model.tokenizer or model.path
    ):
        yield (
            "model.head=masked_lm needs the mask token and the tokens that are never masked, and token rows with "
            "model.config have no tokenizer; set model.tokenizer, or mask_token and special_tokens in model.head: "
            "{masked_lm: …}"
        )
