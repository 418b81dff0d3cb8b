"""Which prepared dataset a spec means, and finding it, without Ray."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from train_loop.data.dataset import Dataset, ShardFile
from train_loop.data.sources import SourceFile, list_files, parquet_rows, parquet_values
from train_loop.errors import DataError
from train_loop.model_folder import model_shape, tokenizer_folder
from train_loop.spec import JobSpec

FORMAT = 1
"""Raise it when the same input would be prepared differently, so that old caches are not taken for new ones."""


def default_cache() -> Path:
    """The cache of the service's default storage root."""
    return Path(os.environ.get("TRAINSHED_HOME", "~/.trainshed")).expanduser() / "runs" / "_cache"


def find_dataset(spec: JobSpec, cache: Path) -> Dataset:
    """The samples of a spec where no preparing is needed any more. Raises DataError."""
    files = list_files(spec.data.train)
    found = ready_made(spec, files) or load(cache / fingerprint(spec, files))
    if found is None:
        raise DataError(
            f"{', '.join(spec.data.train.paths)} is not prepared in {cache}; "
            "run .venv/bin/python -m train_loop.prepare with the same spec first"
        )
    return found


def evaluation_spec(spec: JobSpec, train: Dataset) -> JobSpec | None:
    """The spec that has the eval data of `spec` to train on, in the tokens of its training data; None without any.

    All that prepares, finds and pins training data does so for eval data through it.
    """
    if spec.data.eval is None:
        return None
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"train": spec.data.eval, "eval": None}),
            "model": spec.model.model_copy(update={"tokenizer": train.tokenizer}),
        }
    )


def load(folder: Path) -> Dataset | None:
    """The prepared dataset in a folder of the cache, if it was committed."""
    try:
        return Dataset.model_validate_json((folder / "dataset.json").read_bytes())
    except FileNotFoundError:
        return None


def pinned_dataset(spec: JobSpec, pointer: Path) -> Dataset | None:
    """The samples that a run has begun with, by its pointer to them; None where it has none, or the cache lost them.

    Raises DataError where files that are read as they are have changed since.
    """
    try:
        dataset = Dataset.model_validate_json(pointer.read_bytes())
    except FileNotFoundError:
        return None
    if not all(Path(file.path).exists() for file in dataset.files):
        return None
    files = list_files(spec.data.train)
    if _ready_column(spec, files) is not None and fingerprint(spec, files) != dataset.fingerprint:
        raise DataError(
            f"the files of {', '.join(spec.data.train.paths)} have changed since the run began; put them back, or "
            "start a new run"
        )
    return dataset


def ready_made(spec: JobSpec, files: list[SourceFile]) -> Dataset | None:
    """Tokenised Parquet that needs no packing is taken as it is: row i is sample i. Otherwise None."""
    data, column = spec.data, _ready_column(spec, files)
    if column is None:
        return None
    shards = [ShardFile(path=file.path, rows=parquet_rows(file.path)) for file in files]
    if not sum(shard.rows for shard in shards):
        raise DataError(f"{', '.join(data.train.paths)} holds no rows; an empty dataset cannot be trained on")
    return Dataset(
        fingerprint=fingerprint(spec, files),
        files=tuple(shard for shard in shards if shard.rows),
        sequence_length=data.sequence_length,
        input_ids=column,
        labels=data.columns.labels,
        tokens=sum(parquet_values(file.path, column) for file in files),
    )


def _ready_column(spec: JobSpec, files: list[SourceFile]) -> str | None:
    """The column of tokens that can be trained on as they are, if there is one."""
    return None if spec.data.packing or files[0].format != "parquet" else spec.data.columns.input_ids


def fingerprint(spec: JobSpec, files: list[SourceFile]) -> str:
    """SHA-256 of all that decides what is prepared: files, columns, tokenizer, length, packing, this code's format."""
    content = {
        "format": FORMAT,
        "files": [[file.path, file.format, file.size, file.mtime_ns] for file in files],
        "columns": spec.data.columns.model_dump(),
        "sequence_length": spec.data.sequence_length,
        "packing": spec.data.packing,
        "tokenizer": _tokenizer_identity(spec),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tokenizer_identity(spec: JobSpec) -> list[Any] | None:
    if spec.data.columns.text is None:
        return None
    folder = tokenizer_folder(spec)
    if folder is None:
        return ["byte-level bpe", model_shape(spec.model).vocab]
    return ["file", hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()]
