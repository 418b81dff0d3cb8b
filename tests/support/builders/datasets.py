"""Datasets made of Parquet files that a test has written."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from train_loop.data.dataset import Dataset, Part, ShardFile


def parquet_dataset(*paths: Path, length: int, tokens: int = 0, **parts: Any) -> Dataset:
    """Return a dataset of the rows of files; `parts` names the columns besides input_ids."""
    files = [ShardFile(path=str(p), rows=pq.read_metadata(p).num_rows, size=p.stat().st_size) for p in paths]
    part = Part(fingerprint="x", files=tuple(files), tokens=tokens, **parts)
    return Dataset(fingerprint="x", parts=(part,), sequence_length=length)
