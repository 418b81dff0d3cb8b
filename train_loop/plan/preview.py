"""What is known of the data before a job runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SampleCount:
    """Samples of an epoch of the training data."""

    samples: int
    exact: bool
    """False if there may be fewer."""


@dataclass(frozen=True)
class Preview:
    """What preparing would do to the first rows of a source."""

    source: str
    rows: int
    """Rows that were looked at."""
    bad_rows: int
    """Rows that cannot be trained on."""
    long_rows: int
    """Rows of more tokens than a sample has; on_long_rows is what happens to them."""
    untrained_rows: int
    """Rows that are dropped because no token of them is trained."""
    on_long_rows: str
    notes: tuple[str, ...] = ()
    """Sentences for the user: which rows are left out or cut, and which columns are not used."""
