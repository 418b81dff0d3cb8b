"""Facts about the data that are known before a job runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SampleCount:
    """Number of samples in an epoch of the training data."""

    samples: int
    exact: bool
    """False if the true number may be lower."""


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
    begins_with_bos: bool = False
    """Whether all documents begin with the tokenizer's BOS token."""
    notes: tuple[str, ...] = ()
    """Sentences for the user, about rows that are left out or cut and columns that are not used."""
