"""`data:` what it is trained on."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from train_loop.spec.base import SpecModel, only


class SourceSpec(SpecModel):
    """Where rows come from: a URI, a glob or a list of them."""

    path: str | tuple[str, ...] = Field(description="URI, glob, or a list of them; stdlib:// is Python's own sources")
    format: Literal["auto", "parquet", "jsonl", "text"] = Field(
        default="auto", description="auto goes by the file's ending; text is one document per file"
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The URIs and globs, one or many."""
        return (self.path,) if isinstance(self.path, str) else self.path


class ColumnsSpec(SpecModel):
    """Which columns hold what; exactly one shape of row."""

    text: str | None = None
    input_ids: str | None = Field(default=None, description="tokens of an already tokenised row")
    labels: str | None = Field(default=None, description="aligned with input_ids, not shifted; -100 is not trained")
    messages: Annotated[str | None, only(None)] = None
    prompt: Annotated[str | None, only(None)] = None
    response: Annotated[str | None, only(None)] = None
    image: Annotated[str | None, only(None)] = None

    @model_validator(mode="after")
    def _one_shape(self) -> "ColumnsSpec":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("columns name exactly one of text and input_ids, for example columns: {text: text}")
        if self.labels is not None and self.input_ids is None:
            raise ValueError("columns.labels goes with columns.input_ids; name both, or remove labels")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        return tuple(name for name in (self.text, self.input_ids, self.labels) if name is not None)


class DataSpec(SpecModel):
    """The training data, its shape and its order."""

    train: SourceSpec
    eval: SourceSpec | None = Field(
        default=None, description="held-out rows of the same shape, evaluated every training.eval_steps steps"
    )
    columns: ColumnsSpec = ColumnsSpec(text="text")
    sequence_length: int = Field(default=4096, ge=2, description="tokens per sample")
    packing: bool = Field(default=True, description="several documents share a sample and never see each other")
    shuffle: bool = True
    seed: int = Field(default=0, ge=0)
