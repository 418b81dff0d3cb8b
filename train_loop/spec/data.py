"""`data:` the training and eval data."""

import os
import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from train_loop.spec.base import SpecModel, only

LongRows = Literal["split", "truncate", "truncate_left", "drop", "fail"]
AddBos = Literal["auto"] | bool
"""Rule for the BOS token of documents; auto: as the tokenizer or the chat template writes it."""
Chats = Literal["trained", "whole", "prompt"]
"""Tokens of conversations: with labels of what the assistant wrote; without; or with the start of the next answer."""
_ON_HUB = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w-]*")
"""Id of a dataset of the Hugging Face Hub."""
CYCLE = 10_000
"""Number of consecutive samples, from any start, over which the shares of mixed sources are exact."""


class ColumnsSpec(SpecModel):
    """The columns of a row by role, for exactly one kind of row."""

    text: str | None = Field(default=None, description="column with text")
    input_ids: str | None = Field(default=None, description="column with token ids of tokenised rows")
    labels: str | None = Field(
        default=None, description="column with labels, aligned with input_ids and not shifted; -100 is not trained"
    )
    label: str | None = Field(
        default=None,
        description="column with the label of a row of text or input_ids, for model.head: a class from 0 or its name, "
        "or a number",
    )
    messages: str | None = Field(
        default=None,
        description="column with a conversation for the tokenizer's chat template; only assistant turns are trained",
    )
    tools: str | None = Field(
        default=None, description="column with the tools of a conversation, as a list or its JSON; rows may omit it"
    )
    prompt: str | None = Field(
        default=None,
        description="column with the text before the response, which is not trained; or before chosen and rejected",
    )
    response: str | None = Field(default=None, description="column with the text that is trained, after its prompt")
    chosen: str | None = Field(
        default=None,
        description="column with the better of two texts or conversations, for model.head: reward; with rejected",
    )
    rejected: str | None = Field(default=None, description="column with the worse of the two")
    margin: str | None = Field(
        default=None, description="column with the number by which the reward of chosen is to be higher; optional"
    )
    anchor: str | None = Field(
        default=None, description="column with text whose embedding is to be near that of positive; for head: embedding"
    )
    positive: str | None = Field(default=None, description="column with the text that belongs to anchor")
    negatives: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        default=(), description="columns with texts that do not belong to anchor; optional"
    )
    token_ids: bool = Field(
        default=False, description="columns of pairs and their prompt hold token ids of tokenised rows instead of text"
    )
    weight: str | None = Field(default=None, description="column with the weight of the row's tokens in the loss")
    image: Annotated[str | None, only(None)] = Field(default=None, description="column with images; not supported yet")
    own: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        default=(), description="columns of own code (code), which its batch function gets as they are in the files"
    )

    @model_validator(mode="after")
    def _one_shape(self) -> "ColumnsSpec":
        if (self.prompt is None) != (self.response is None) and not (self.prompt and self.chosen):
            raise ValueError("columns.prompt and columns.response go together; name both, or neither")
        shapes = [self.text, self.input_ids, self.messages, self.response, self.chosen, self.anchor, self.own or None]
        if sum(shape is not None for shape in shapes) != 1:
            raise ValueError(
                "columns name exactly one of text, input_ids, messages, prompt with response, chosen with rejected, "
                "anchor with positive, and own, for example columns: {text: text}"
            )
        if self.own and self.weight is not None:
            raise ValueError("columns.weight is the weight of tokens, which own columns do not have; remove it")
        if len(set(self.own)) < len(self.own):
            raise ValueError("columns.own names a column twice; remove one of the two")
        if self.labels is not None and self.input_ids is None:
            raise ValueError("columns.labels goes with columns.input_ids; name both, or remove labels")
        if self.label is not None and self.text is None and self.input_ids is None:
            raise ValueError("columns.label goes with columns.text or columns.input_ids; name one of them")
        if self.tools is not None and not self.may_chat:
            raise ValueError("columns.tools goes with columns.messages; name both, or remove tools")
        return self

    @model_validator(mode="after")
    def _pairs_are_whole(self) -> "ColumnsSpec":
        for name, other in (("chosen", "rejected"), ("anchor", "positive")):
            if (getattr(self, name) is None) != (getattr(self, other) is None):
                raise ValueError(f"columns.{name} and columns.{other} go together; name both, or neither")
        if self.margin is not None and self.chosen is None:
            raise ValueError("columns.margin goes with columns.chosen; name both, or remove margin")
        if self.negatives and self.anchor is None:
            raise ValueError("columns.negatives go with columns.anchor; name both, or remove negatives")
        if self.token_ids and not self.sequences:
            raise ValueError("columns.token_ids is for pairs; name tokenised rows with columns.input_ids instead")
        if self.sequences and self.weight is not None:
            raise ValueError("columns.weight is the weight of trained tokens, which pairs do not have; remove it")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read; every row must have all of them except tools."""
        text = (self.text, self.messages, self.tools, self.prompt, self.response, *self.sequences)
        every = (*text, self.input_ids, self.labels, self.label, self.margin, self.weight, *self.own)
        return tuple(name for name in every if name is not None)

    @property
    def sequences(self) -> tuple[str, ...]:
        """The columns whose sequences are one sample together; empty if each row is one sequence."""
        every = (self.chosen, self.rejected, self.anchor, self.positive, *self.negatives)
        return tuple(name for name in every if name is not None)

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns with text. Those of pairs may also hold conversations, or token ids if `token_ids` is set."""
        return tuple(name for name in (self.text, self.prompt, self.response, *self.sequences) if name is not None)

    @property
    def may_chat(self) -> bool:
        """True if rows can have conversations."""
        return self.messages is not None or (self.chosen is not None and not self.token_ids)

    @property
    def tokenised(self) -> bool:
        """True if rows hold tokens, or values of own columns, instead of text."""
        return self.input_ids is not None or self.token_ids or bool(self.own)


def check_source(uri: str) -> None:
    """Raise ValueError for a path of data that service and workers would not find at the same place."""
    if "://" in uri or os.path.isabs(uri):
        return
    download = ""
    if _ON_HUB.fullmatch(uri):
        folder = f"/data/{uri.rpartition('/')[2]}"
        command = f"hf download {uri} --repo-type dataset --local-dir {folder}"
        download = f", or run `{command}` below a storage root, and write file://{folder}"
    raise ValueError(
        f"{uri} is a relative path, but service and workers have different folders; use an absolute path{download}"
    )


class SourceSpec(SpecModel):
    """A source of rows: a URI, a glob or a list of them."""

    path: str | tuple[str, ...] = Field(
        description="URI or glob of the files, or a list of them, below a storage root; stdlib:// is Python's "
        "standard library"
    )
    format: Literal["auto", "parquet", "jsonl", "text"] = Field(
        default="auto", description="file format; auto: by file extension; text: each file is one document"
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="share of the samples, relative to the weights of the other sources; all sources have one, or none",
    )
    columns: ColumnsSpec | None = Field(default=None, description="columns of this source [default: data.columns]")

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for uri in filter(None, (path,) if isinstance(path, str) else path):
            check_source(uri)
        return path

    @model_validator(mode="after")
    def _names_something(self) -> "SourceSpec":
        if not all(self.paths or ("",)):
            raise ValueError("path names no file; give a URI, a glob, or a list of them")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The URIs and globs of the source."""
        return (self.path,) if isinstance(self.path, str) else self.path


def _one_or_several(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "source"


Sources = Annotated[
    Annotated[SourceSpec, Tag("source")] | Annotated[tuple[SourceSpec, ...], Tag("list")],
    Discriminator(_one_or_several),
]


class DataSpec(SpecModel):
    """The training data, its shape and its order."""

    train: Sources = Field(
        description="source of the training data, or a list of sources; with weights they are mixed in these "
        "proportions"
    )
    eval: Sources | None = Field(
        default=None, description="source of held-out rows, or a list; evaluated every training.eval_steps steps"
    )
    columns: ColumnsSpec = Field(
        default=ColumnsSpec(text="text"),
        description="columns of a row; exactly one of text, input_ids, messages, prompt with response, chosen with "
        "rejected, anchor with positive, or own",
    )
    system_prompt: str | None = Field(default=None, description="system message for conversations that have none")
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="chat template of messages: a name among the tokenizer's templates, or the URI of a Jinja file "
        "[default: as transformers chooses: tool_use for rows with tools if the tokenizer has it, else default]",
    )
    add_bos: AddBos = Field(
        default="auto",
        description="begin each document with BOS; auto: as the tokenizer or the chat template does",
    )
    on_bad_rows: Literal["fail", "skip"] = Field(
        default="fail", description="invalid rows: fail the job, or skip and count them"
    )
    on_long_rows: LongRows | None = Field(
        default=None,
        description="rows longer than sequence_length; truncate keeps their start, truncate_left BOS and their end; "
        "null: drop for messages, prompt with response, and chosen with rejected, truncate for rows with a label and "
        "for anchors, split for others",
    )
    sequence_length: int = Field(default=4096, ge=2, description="tokens per sample, at least 2")
    packing: bool = Field(
        default=True, description="pack several documents into a sample; they do not attend to each other"
    )
    shuffle: bool = Field(default=True, description="shuffle the samples in each epoch")
    seed: int = Field(default=0, ge=0, description="seed of the order of samples")

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources of the training data."""
        return (self.train,) if isinstance(self.train, SourceSpec) else self.train

    @property
    def eval_sources(self) -> tuple[SourceSpec, ...]:
        """The sources of the eval data, if any."""
        return (self.eval,) if isinstance(self.eval, SourceSpec) else self.eval or ()

    def columns_of(self, source: SourceSpec) -> ColumnsSpec:
        """Return the columns of a source's rows."""
        return source.columns or self.columns

    def long_rows_of(self, columns: ColumnsSpec) -> LongRows:
        """Return the handling of rows of these columns that are longer than a sample."""
        default: LongRows = "drop" if columns.messages or columns.response or columns.chosen else "split"
        return self.on_long_rows or ("truncate" if columns.label or columns.anchor else default)

    def drops_untrained(self, columns: ColumnsSpec) -> bool:
        """Return whether rows of these columns without any trained token are dropped; tokenised rows stay."""
        return bool(columns.messages or columns.response)

    @property
    def sequences(self) -> int:
        """The number of sequences of a sample, each of at most `sequence_length` tokens."""
        return max(len(self.columns_of(source).sequences) or 1 for source in (*self.sources, *self.eval_sources))

    @property
    def has_own_columns(self) -> bool:
        """True if any source has columns of own code."""
        return any(self.columns_of(source).own for source in (*self.sources, *self.eval_sources))

    @property
    def reads_text(self) -> bool:
        """True if any source must be tokenised."""
        return not all(self.columns_of(source).tokenised for source in (*self.sources, *self.eval_sources))

    @model_validator(mode="after")
    def _weights_for_all_or_none(self) -> "DataSpec":
        if not self.sources:
            raise ValueError("data.train names no source; give at least one")
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"{sum(weighted)} of {len(weighted)} sources have a weight; give every source a weight, or "
                "none to read them one after the other"
            )
        together = sum(source.weight or 0 for source in self.sources)
        for number, source in enumerate(self.sources):
            if source.weight is not None and not CYCLE * source.weight >= together:
                raise ValueError(
                    f"source {number} has weight {source.weight:g} of {together:g} in total, less than one sample in "
                    f"{CYCLE}; raise its weight, or remove the source"
                )
        if any(source.weight is not None for source in self.eval_sources):
            raise ValueError("data.eval is evaluated completely, so a weight has no effect; remove it")
        return self

    @property
    def template_file(self) -> str | None:
        """The URI of the chat template; None if `chat_template` is a name or not set."""
        return self.chat_template if self.chat_template is not None and "/" in self.chat_template else None

    @field_validator("chat_template")
    @classmethod
    def _template_is_local(cls, value: str | None) -> str | None:
        if value is not None and "/" in value and not value.startswith(("/", "file:/")):
            raise ValueError(
                f"{value!r:.200} cannot be read as a chat template; give the file:// URI or the absolute path of a "
                "Jinja file on storage that all nodes mount, or the name of one of the tokenizer's templates"
            )
        return value

    @model_validator(mode="after")
    def _text_settings_have_text(self) -> "DataSpec":
        shapes = [self.columns_of(source) for source in (*self.sources, *self.eval_sources)]
        for name, value in (("system_prompt", self.system_prompt), ("chat_template", self.chat_template)):
            if value is not None and not any(shape.may_chat for shape in shapes):
                raise ValueError(f"{name} goes with columns.messages; name the column, or remove {name}")
        if self.add_bos != "auto" and not self.reads_text:
            raise ValueError("add_bos goes with text, and no source has text; remove add_bos")
        return self
