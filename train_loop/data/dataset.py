"""Samples: their format on storage, and their form in the training loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from train_loop.data.columns import (
    INPUT_IDS,
    LABELS,
    SAMPLE,
    STORED,
    ByColumn,
    Column,
    from_arrow,
    to_arrow,
    token_columns,
)
from train_loop.data.files import File
from train_loop.data.order import Mixture

Tokens = NDArray[np.int32]
Weights = NDArray[np.float32]
Cells = Mapping[str, Any]
"""One sample by column, as stored."""
IGNORE = LABELS.fill
"""Label of a token that is not trained."""


class ShardFile(BaseModel):
    """A Parquet file of samples, with its number of rows and its size."""

    model_config = ConfigDict(frozen=True)
    path: str
    rows: int
    size: int
    """Size in bytes."""
    columns: dict[str, int] = {}
    """Byte offset of each column's values, if they are contiguous and uncompressed in the file."""

    @property
    def file(self) -> File:
        """The file, for reading."""
        return File(self.path, self.size, version="")


class Part(BaseModel):
    """The samples of one source: sample i is row i of the files in their order."""

    model_config = ConfigDict(frozen=True)
    fingerprint: str
    files: tuple[ShardFile, ...]
    input_ids: str | None = INPUT_IDS.name
    """Column with tokens; None if a user's own columns take their place."""
    labels: str | None = None
    documents: str | None = None
    """Column with the lengths of the documents in a sample, in order; without it a sample is one document."""
    weights: str | None = None
    """Column with the weight of the row, or of each of its documents."""
    targets: str | None = None
    """Column with the label of the row, or of each of its documents."""
    own: tuple[Column, ...] = ()
    """Columns of the user's own model, which are read as they are in the files."""
    index: str | None = None
    """File with the position of each sample in the shards; without it the Parquet files are read directly."""
    tokens: int
    """Tokens in all samples, padding not counted."""
    rows: int = 0
    """Rows read from the source."""
    bad_rows: int = 0
    """Rows that were skipped because they cannot be trained on."""
    on_long_rows: str = "split"
    """Rule for rows with more tokens than a sample."""
    long_rows: int = 0
    """Rows with more tokens than a sample, dropped rows included."""
    dropped_rows: int = 0
    """Rows that were dropped because they have more tokens than a sample."""
    untrained_rows: int = 0
    """Rows that were dropped because none of their tokens is trained."""
    begins_with_bos: bool | None = None
    """Whether all documents begin with the tokenizer's BOS token; None for rows of token ids."""
    sample_without_end: str | None = None
    """A conversation with its trained text in ⟦⟧, if no end token of any turn is trained in any row."""
    digest: str | None = None
    """SHA-256 of all prepared samples; None for samples that are read directly or that an earlier version prepared."""
    libraries: dict[str, str] = {}
    """Versions of the packages that turned text into tokens."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(file.rows for file in self.files)

    @property
    def stored(self) -> dict[Column, str]:
        """The columns of tokens in its files, with their names there."""
        return {column: name for column in STORED if (name := getattr(self, column.name)) is not None}

    def has_samples_of(self, other: "Part") -> bool:
        """Return whether both have the same samples: by digest, or by fingerprint and counts without one."""
        if self.digest and other.digest:
            return self.digest == other.digest
        mine, theirs = ((part.fingerprint, part.samples, part.tokens) for part in (self, other))
        return mine == theirs

    def in_folder(self, folder: Path) -> "Part":
        """Return the same prepared samples with paths to their files in a folder."""
        assert self.index is not None
        files = tuple(file.model_copy(update={"path": str(folder / Path(file.path).name)}) for file in self.files)
        return self.model_copy(update={"files": files, "index": str(folder / Path(self.index).name)})


class Masking(BaseModel):
    """The mask of a masked language model, by the rule of BERT (Devlin et al., 2018)."""

    model_config = ConfigDict(frozen=True)
    seed: int
    probability: float
    """Probability of a token to be masked."""
    replaced: float
    """Share of masked tokens in whose place the mask token is."""
    random: float
    """Share of masked tokens in whose place a random token is; the rest stays."""
    token: int
    """The mask token."""
    never: tuple[int, ...]
    """Tokens that are never masked."""
    vocabulary: int
    """Random tokens are below this number."""


class Dataset(BaseModel):
    """The content of data/dataset.json: the samples of a run, source after source."""

    model_config = ConfigDict(frozen=True)
    fingerprint: str
    parts: tuple[Part, ...]
    sequence_length: int
    mixture: Mixture | None = None
    """Mixture of the sources; without it an epoch contains all samples once."""
    pad_token: int = 0
    sequences: int = 1
    """Sequences per sample, each of at most `sequence_length` tokens."""
    aligned: bool = False
    """True if the label of a token belongs to the token itself, and not to its predecessor, which predicts it."""
    tokenizer: str | None = None
    masking: Masking | None = None
    """Mask of masked language models; None for other heads."""

    @property
    def samples(self) -> int:
        """Number of different samples."""
        return sum(part.samples for part in self.parts)

    def has_samples_of(self, other: "Dataset") -> bool:
        """Return whether both have the same samples and mixture."""
        if (self.sequence_length, self.mixture) != (other.sequence_length, other.mixture):
            return False
        if len(self.parts) != len(other.parts):
            return False
        return all(mine.has_samples_of(theirs) for mine, theirs in zip(self.parts, other.parts, strict=True))

    @property
    def tokens(self) -> int:
        """Tokens in all samples, padding not counted."""
        return sum(part.tokens for part in self.parts)

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch; with a mixture, samples until every source has been read completely."""
        return self.mixture.epoch if self.mixture else self.samples

    @property
    def epoch_tokens(self) -> int:
        """Tokens in an epoch; an estimate with a mixture."""
        if self.mixture is None:
            return self.tokens
        taken = [self.mixture.epoch * quota / sum(self.mixture.quotas) for quota in self.mixture.quotas]
        return round(sum(part.tokens * n / part.samples for part, n in zip(self.parts, taken, strict=True)))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of its rows in the training loop."""
        own = self.parts[0].own
        if self.parts[0].input_ids is None:
            return (SAMPLE, *own)
        tokens = token_columns(
            pad_token=self.pad_token, weighted=self.weighted, labelled=self.labelled, sequences=self.sequences
        )
        return (*tokens, *own)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the training loop; for ragged columns an estimate from the size of their files."""
        columns = self.columns
        ragged = any(column.kind == "ragged" for column in columns)
        stored = sum(file.size for part in self.parts for file in part.files) // self.samples if ragged else 0
        return stored + sum(column.bytes_in(self.sequence_length) for column in columns)

    @property
    def sample_tokens(self) -> int:
        """Maximum tokens of a sample."""
        return self.sequences * self.sequence_length

    @property
    def weighted(self) -> bool:
        """True if rows have weights."""
        return any(part.weights for part in self.parts)

    @property
    def labelled(self) -> bool:
        """True if rows have labels of their own."""
        return any(part.targets for part in self.parts)

    @property
    def utilisation(self) -> float:
        """Fraction of trained positions with a token instead of padding; an estimate with a mixture."""
        return self.epoch_tokens / (self.epoch_samples * self.sample_tokens)


@dataclass(frozen=True)
class Rows(ByColumn[NDArray[Any]]):
    """Samples in the form of the training loop, by column."""

    def to_arrow(self) -> pa.Table:
        """Return the rows as a table for Ray Data."""
        return to_arrow(self.values)

    @classmethod
    def from_arrow(cls, table: pa.Table) -> "Rows":
        """Return the rows of a table from `to_arrow`."""
        return cls(from_arrow(table))

    def slice(self, start: int, stop: int) -> "Rows":
        """Return rows [start, stop)."""
        return Rows({name: values[start:stop] for name, values in self.values.items()})
