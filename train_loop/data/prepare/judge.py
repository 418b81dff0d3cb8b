"""The rules for rows that end a job; the preview before a job runs applies them to its first rows."""

from collections.abc import Sequence

from train_loop.data.prepare.encode import BadRow, Encoded
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.rows import locate
from train_loop.data.prepare.sources import SourceFile
from train_loop.errors import DataError

Place = tuple[SourceFile, int]
"""A row's file, and its place in that file, as in `Row.place`."""


def check_rows(encoded: Sequence[Encoded], places: Sequence[Place], fit: Fit, *, skip: bool) -> None:
    """Raise DataError for the first row that ends the job: a bad row, unless these are skipped, or one too long."""
    for row, place in zip(encoded, places, strict=True):
        if isinstance(row, BadRow) and not skip:
            raise DataError(f"{_where(place)}: {row.reason}; correct the row, or set on_bad_rows: skip")
    for row, place in zip(encoded, places, strict=True):
        if not isinstance(row, BadRow) and fit.refuses(row):
            raise DataError(
                f"{_where(place)} has {len(row.input_ids)} tokens, more than sequence_length={fit.length}, and "
                "on_long_rows is fail; raise sequence_length, or choose drop, truncate, truncate_left or split"
            )


def _where(place: Place) -> str:
    (where,) = locate([place])
    return where
