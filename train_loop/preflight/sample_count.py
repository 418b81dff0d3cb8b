"""Number of samples in the training data, if it is known before preparation."""

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from train_loop.data.files import open_file, report_damage
from train_loop.data.prepare.columns import plain_table
from train_loop.data.prepare.sources import SourceFile, list_files
from train_loop.plan import SampleCount
from train_loop.spec import ColumnsSpec, DataSpec, JobSpec

_MOST_BYTES = 64 * 2**20
"""Maximum total size of the files that are read for a count."""


def count_samples(spec: JobSpec) -> SampleCount | None:
    """Return the samples per epoch of tokenised Parquet, from the lengths of its rows; None for other data.

    For packed rows the number is an upper bound. Raises DataError and OSError for unreadable files.
    """
    data = spec.data
    columns = [data.columns_of(source) for source in data.sources]
    if not all(one.tokenised for one in columns) or any(source.weight is not None for source in data.sources):
        return None
    if data.has_own_columns:
        rows = sum(_rows(file) for source in data.sources for file in list_files(source))
        return SampleCount(rows, exact=True)
    files = [(file, one) for source, one in zip(data.sources, columns, strict=True) for file in list_files(source)]
    if any(file.format != "parquet" for file, _ in files) or sum(file.size for file, _ in files) > _MOST_BYTES:
        return None
    samples = sum(_samples(file, one, data) for file, one in files)
    return SampleCount(samples, exact=not data.packing and data.on_bad_rows == "fail")


def _rows(file: SourceFile) -> int:
    with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
        return int(pq.ParquetFile(opened).metadata.num_rows)


def _samples(file: SourceFile, columns: ColumnsSpec, data: DataSpec) -> int:
    """Return the samples of a file if no two rows share a sample."""
    before, names = columns.prompt, [columns.input_ids] if columns.input_ids is not None else list(columns.sequences)
    with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
        parquet = pq.ParquetFile(opened)
        if not parquet.metadata.num_rows:
            # Its columns are not checked, as no row is read from them.
            return 0
        table = plain_table(parquet.read(columns=[*names, *([before] if before is not None else [])]))
    sizes = {name: pc.list_value_length(table[name]).fill_null(0).to_numpy() for name in table.column_names}
    counted = [sizes[name] + (0 if before is None else sizes[before]) for name in names]
    # Rows without tokens become no samples.
    lengths = np.where(np.all(counted, axis=0), np.max(counted, axis=0), 0)
    rule = data.long_rows_of(columns)
    if rule == "split":
        return int((-(-lengths // data.sequence_length)).sum())
    return int(((lengths > 0) & ((lengths <= data.sequence_length) | (rule != "drop"))).sum())
