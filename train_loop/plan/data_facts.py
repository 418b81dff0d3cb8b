"""Facts about the data that are known before a job runs."""

from dataclasses import dataclass

_TEXT_BATCH, _TOKENS_BATCH = 4, 6
"""Bytes of memory for each byte of a Parquet batch: 4.4 and 5.7 were measured for text and lists of int32."""
_ENCODED = 143
"""Bytes of memory for each byte of a row of text while it is tokenised, measured with rows of 4 and 8 MiB."""
_PARSED = 9
"""Bytes of memory for each byte of a JSON line of token ids, measured with lines of 15 and 61 MiB."""


@dataclass(frozen=True)
class SampleCount:
    """Number of samples in an epoch of the training data."""

    samples: int
    exact: bool
    """False if the true number may be lower."""


@dataclass(frozen=True)
class LargestRead:
    """The part of the data for which one task of preparation needs most memory."""

    pointer: str
    """JSON pointer of its source's path."""
    file: str
    format: str
    packed: int
    """Bytes of the row group's columns in a Parquet file; 0 for other formats."""
    batch: int
    """Uncompressed bytes of the rows of it that are decoded at once."""
    row: int
    """Bytes of its longest known row: a text file, the first JSON line, or the mean row of a Parquet row group."""
    text: bool
    """Whether its rows must be tokenised."""
    corpus: int = 0
    """Bytes of all text: sizes of files, and of Parquet the decompressed columns, in which equal texts count once."""
    unseen: int = 0
    """Bytes that a JSON line of any file may have, where not all of the file was read; 0 if all lines are known."""

    @property
    def group_bytes(self) -> int:
        """Return the memory of a Parquet row group while it is read."""
        return self.packed + (_TEXT_BATCH if self.text else _TOKENS_BATCH) * self.batch

    @property
    def row_bytes(self) -> int:
        """Return the memory of its longest row while that is parsed and tokenised."""
        return self._bytes_per_byte * self.row

    @property
    def unseen_bytes(self) -> int:
        """Return the memory of the longest line that may exist unseen."""
        return (_ENCODED if self.text else _PARSED) * self.unseen

    @property
    def _bytes_per_byte(self) -> int:
        return _ENCODED if self.text else _PARSED if self.format == "jsonl" else 0


@dataclass(frozen=True)
class Preview:
    """Effects of data preparation on the first rows of a source."""

    source: str
    rows: int
    """Rows that were checked."""
    bad_rows: int
    """Rows that cannot be trained on."""
    long_rows: int
    """Rows of more tokens than a sample has; on_long_rows decides their handling."""
    untrained_rows: int
    """Rows that are dropped because none of their tokens is trained."""
    on_long_rows: str
    begins_with_bos: bool | None = None
    """Whether all documents begin with the tokenizer's BOS token; None for rows of token ids."""
    notes: tuple[str, ...] = ()
    """Sentences for the user, about rows that are left out or cut and columns that are not used."""
