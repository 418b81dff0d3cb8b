"""What samples are: on storage, and as the loop takes them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from train_loop.data.files import File
from train_loop.data.order import Ids, Mixture

Tokens = NDArray[np.int32]
Weights = NDArray[np.float32]
IGNORE = -100
"""A label that is not trained on."""


class ShardFile(BaseModel):
    """A Parquet file of samples, as it was when it was taken in."""

    model_config = ConfigDict(frozen=True)
    path: str
    rows: int
    size: int
    """Bytes."""
    columns: dict[str, int] = {}
    """Byte at which the values of a column begin, where they lie one after the other as they are."""

    @property
    def file(self) -> File:
        """What reads it."""
        return File(self.path, self.size, version="")


class Part(BaseModel):
    """The samples of one source: sample i is row i of the files in their order."""

    model_config = ConfigDict(frozen=True)
    fingerprint: str
    files: tuple[ShardFile, ...]
    input_ids: str = "input_ids"
    labels: str | None = None
    documents: str | None = None
    """Column with the lengths of the documents in a sample, in order; without it a sample is one document."""
    weights: str | None = None
    """Column with the weight of the row, or of each of its documents."""
    index: str | None = None
    """File that says where in the shards each sample lies; without it the files are read as they are."""
    tokens: int
    """Tokens in all samples, padding not counted."""
    rows: int = 0
    """Rows that were read for it."""
    bad_rows: int = 0
    """Those of them that were skipped."""
    on_long_rows: str = "split"
    """What happened to rows of more tokens than a sample has."""
    long_rows: int = 0
    """Number of these rows, dropped ones included."""
    dropped_rows: int = 0
    """Those of them that were dropped."""
    untrained_rows: int = 0
    """Rows that were dropped because no token of them is trained."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(file.rows for file in self.files)

    def in_folder(self, folder: Path) -> "Part":
        """The same prepared samples, the files of which lie in a folder."""
        assert self.index is not None
        files = tuple(file.model_copy(update={"path": str(folder / Path(file.path).name)}) for file in self.files)
        return self.model_copy(update={"files": files, "index": str(folder / Path(self.index).name)})


class Dataset(BaseModel):
    """data/dataset.json: the samples of a run, the sources one after the other."""

    model_config = ConfigDict(frozen=True)
    fingerprint: str
    parts: tuple[Part, ...]
    sequence_length: int
    mixture: Mixture | None = None
    """How the sources are mixed; without it an epoch is all of them."""
    pad_token: int = 0
    tokenizer: str | None = None

    @property
    def samples(self) -> int:
        """Number of different samples."""
        return sum(part.samples for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens in all samples, padding not counted."""
        return sum(part.tokens for part in self.parts)

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch; of a mixture, until every source has been seen whole."""
        return self.mixture.epoch if self.mixture else self.samples

    @property
    def epoch_tokens(self) -> int:
        """Tokens in an epoch; of a mixture, an estimate."""
        if self.mixture is None:
            return self.tokens
        taken = [self.mixture.epoch * quota / sum(self.mixture.quotas) for quota in self.mixture.quotas]
        return round(sum(part.tokens * n / part.samples for part, n in zip(self.parts, taken, strict=True)))

    @property
    def weighted(self) -> bool:
        """Whether rows have weights."""
        return any(part.weights for part in self.parts)

    @property
    def utilisation(self) -> float:
        """The share of what is trained that holds tokens, and no padding; of a mixture, an estimate."""
        return self.epoch_tokens / (self.epoch_samples * self.sequence_length)


class Cells(NamedTuple):
    """One sample as it is stored."""

    input_ids: NDArray[Any]
    labels: NDArray[Any] | None = None
    documents: NDArray[Any] | None = None
    weights: NDArray[Any] | None = None


@dataclass(frozen=True)
class Rows:
    """Samples as the loop takes them, n of T tokens each.

    `labels` are aligned with `input_ids`, not shifted; `position_ids` restart with every document.
    """

    samples: Ids  # [n]
    lengths: Tokens  # [n] tokens that are not padding
    input_ids: Tokens  # [n, T]
    labels: Tokens  # [n, T]
    position_ids: Tokens  # [n, T]
    weights: Weights | None = None  # [n, T] of the token at that place; None where every token counts for one

    def to_arrow(self) -> pa.Table:
        """The rows as a table that travels through Ray Data."""
        columns: dict[str, Any] = {"sample": self.samples, "length": self.lengths}
        for name in ("input_ids", "labels", "position_ids", "weights"):
            values = getattr(self, name)
            if values is not None:
                columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        return pa.table(columns)

    @classmethod
    def from_arrow(cls, table: pa.Table) -> "Rows":
        """The inverse of `to_arrow`."""
        table = table.combine_chunks()
        samples = table["sample"].to_numpy()

        def matrix(name: str) -> NDArray[Any]:
            flat: NDArray[Any] = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            return flat.reshape(len(samples), -1)

        weights = matrix("weights") if "weights" in table.column_names else None
        ids, labels, positions = (matrix(name) for name in ("input_ids", "labels", "position_ids"))
        return cls(samples, table["length"].to_numpy(), ids, labels, positions, weights)

    def slice(self, start: int, stop: int) -> "Rows":
        """Rows start to stop."""
        values: list[Any] = [getattr(self, field.name) for field in fields(self)]
        return Rows(*(None if value is None else value[start:stop] for value in values))  # type: ignore[arg-type]
