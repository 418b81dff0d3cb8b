"""The rows of a spec's files, which results repeat: row i is sample i of the prepared data."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from train_loop.data.dataset import Dataset
from train_loop.data.prepare.cache import fingerprint, library_versions, list_sources
from train_loop.data.prepare.rows import cut, read_piece
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec, JobSpec

_PIECE_BYTES = 32 * 2**20


def check_whole(dataset: Dataset) -> None:
    """Raise DataError if a row has become no sample, because it has no tokens."""
    for part in dataset.parts:
        if part.rows and part.rows != part.samples:
            raise DataError(
                f"{part.rows - part.samples} of {part.rows} rows have no tokens, and each row must have results; "
                "remove empty rows"
            )


def check_unchanged(spec: JobSpec, dataset: Dataset) -> None:
    """Raise DataError if files have changed since their rows became the dataset's samples."""
    tokenizer = Path(dataset.tokenizer) if dataset.tokenizer else None
    for source, part in zip(list_sources(spec), dataset.parts, strict=True):
        # Other versions of packages have another fingerprint for the same files.
        known = not part.libraries or part.libraries == library_versions()
        if known and fingerprint(spec, source, tokenizer) != part.fingerprint:
            raise DataError(f"{source} has changed since the job began; restore its files, or submit a new job")


def read_input_rows(spec: JobSpec, *, start: int) -> Iterator[dict[str, Any]]:
    """Yield the values of the columns of each row, from row `start` on, in the order of the files."""
    return islice(_all_rows(spec), start, None)


def _all_rows(spec: JobSpec) -> Iterator[dict[str, Any]]:
    for source in list_sources(spec):
        for piece in cut(source.files, _PIECE_BYTES):
            for chunk in read_piece(piece, source.columns):
                yield from (_with_json(row.values, source.columns) for row in chunk.rows)


def _with_json(values: dict[str, Any], columns: ColumnsSpec) -> dict[str, Any]:
    """Return the values of a row with messages and tools as JSON; text stays as it is."""
    nested = {name: values.get(name) for name in (columns.messages, columns.tools) if name is not None}
    return values | {
        name: value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in nested.items()
    }
