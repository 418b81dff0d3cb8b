"""Raw files → prepared samples in the cache: read and tokenise with Ray Data, pack, write Parquet, commit.

A prepared dataset is keyed by a fingerprint of all that decides its content and shared by every job that asks for the
same. It appears under its final name by one rename, so that it is whole or not there.
"""

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from train_loop.data.cache import find_dataset, fingerprint, load, ready_made
from train_loop.data.dataset import Dataset, ShardFile
from train_loop.data.execution import ordered_context
from train_loop.data.pack import Document, Sample, one_per_sample, pack
from train_loop.data.sources import SourceFile, list_files
from train_loop.data.tokenizer import load_tokenizer, train_tokenizer
from train_loop.errors import DataError
from train_loop.model_folder import model_shape, tokenizer_folder
from train_loop.run_dir import sync, write_durably
from train_loop.spec import JobSpec

_SHARD_ROWS = 16_384
_GROUP_ROWS = 64
_TOKENIZER_TEXT = 64 * 2**20
"""Characters that a tokenizer is trained on; more changes its merges little and its time much."""

Report = Callable[..., None]


def prepare(spec: JobSpec, cache: Path, report: Report) -> Dataset:
    """The samples of a spec, prepared now or by an earlier job. Raises DataError."""
    files = list_files(spec.data.train)
    folder = cache / fingerprint(spec, files)
    dataset = ready_made(spec, files) or load(folder)
    if dataset is not None:
        return dataset
    _prepare_into(folder, spec, files, report)
    return find_dataset(spec, cache)


def _prepare_into(folder: Path, spec: JobSpec, files: list[SourceFile], report: Report) -> None:
    report("preparing", files=len(files), bytes=sum(file.size for file in files))
    work = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex}")
    work.mkdir(parents=True)
    try:
        dataset = _build(work, folder, spec, files)
        write_durably(work / "dataset.json", dataset.model_dump_json(indent=2))
        _commit(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _commit(work: Path, folder: Path) -> None:
    try:
        work.rename(folder)
    except OSError:
        # Another job prepared the same thing meanwhile: one is as good as the other.
        if not (folder / "dataset.json").exists():
            raise
    sync(folder.parent)


def _build(work: Path, folder: Path, spec: JobSpec, files: list[SourceFile]) -> Dataset:
    if not ray.is_initialized():
        # By itself, and not in a job: the cluster that RAY_ADDRESS names, or one for as long as this process lives.
        ray.init(logging_level=logging.WARNING)
    ordered_context()
    rows = _read(files, spec)
    tokenizer, eos = None, 0
    if spec.data.columns.text is not None:
        tokenizer = _tokenizer(rows, work, spec)
        eos = load_tokenizer(tokenizer).eos
        rows = rows.map_batches(
            _tokenise, batch_format="pyarrow", fn_kwargs={"column": spec.data.columns.text, "tokenizer": tokenizer}
        )
    cut = pack if spec.data.packing else one_per_sample
    shards = list(_write(work, cut(_documents(rows, spec), spec.data.sequence_length)))
    if not shards:
        raise DataError(f"{', '.join(spec.data.train.paths)} holds no tokens; an empty dataset cannot be trained on")
    return Dataset(
        fingerprint=folder.name,
        files=tuple(ShardFile(path=str(folder / name), rows=rows) for name, rows, _ in shards),
        sequence_length=spec.data.sequence_length,
        labels="labels" if spec.data.columns.labels else None,
        documents="documents",
        pad_token=eos,
        tokens=sum(tokens for _, _, tokens in shards),
        tokenizer=tokenizer and tokenizer.replace(str(work), str(folder)),
    )


def _read(files: list[SourceFile], spec: JobSpec) -> ray.data.Dataset:
    paths = [file.path for file in files]
    if files[0].format == "parquet":
        return ray.data.read_parquet(paths).select_columns(list(spec.data.columns.names))
    if files[0].format == "jsonl":
        return ray.data.read_json(paths, lines=True)
    # A task for every small file would spend more on tasks than on files.
    blocks = max(1, min(len(files), 4 * int(ray.cluster_resources().get("CPU", 1))))
    return ray.data.read_binary_files(paths, include_paths=True, override_num_blocks=blocks).map_batches(
        _decode, batch_format="pyarrow"
    )


def _decode(batch: pa.Table) -> pa.Table:
    texts = []
    for path, content in zip(batch["path"].to_pylist(), batch["bytes"].to_pylist(), strict=True):
        try:
            texts.append(content.decode())
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no UTF-8 text: {error}; convert it, or leave it out of the glob") from error
    return pa.table({"text": pa.array(texts, pa.large_string())})


def _tokenizer(rows: ray.data.Dataset, work: Path, spec: JobSpec) -> str:
    """The folder of the tokenizer to use; one trained on the data lies beside the samples."""
    folder, vocab = tokenizer_folder(spec), model_shape(spec.model).vocab
    if folder is None:
        folder = work / "tokenizer"
        texts = _some_text(rows, str(spec.data.columns.text))
        train_tokenizer(texts, vocab_size=vocab, folder=folder)
    load_tokenizer(str(folder)).check_fits(vocab)
    return str(folder)


def _some_text(rows: ray.data.Dataset, column: str) -> Iterator[str]:
    taken = 0
    for batch in rows.iter_batches(batch_format="pyarrow", batch_size=None):
        for text in filter(None, batch[column].to_pylist()):
            yield text
            taken += len(text)
            if taken > _TOKENIZER_TEXT:
                return


def _tokenise(batch: pa.Table, column: str, tokenizer: str) -> pa.Table:
    texts = [text for text in batch[column].to_pylist() if text]
    ids = load_tokenizer(tokenizer).encode(texts)
    return pa.table({"input_ids": pa.array(ids, pa.large_list(pa.int32()))})


def _documents(rows: ray.data.Dataset, spec: JobSpec) -> Iterator[Document]:
    ids = spec.data.columns.input_ids or "input_ids"
    labels = spec.data.columns.labels
    for batch in rows.iter_batches(batch_format="pyarrow", batch_size=None):
        columns = [batch[name] for name in (ids, labels) if name is not None]
        for cells in zip(*columns, strict=True):
            yield Document(*(np.asarray(cell.values, np.int32) for cell in cells))


def _write(work: Path, samples: Iterable[Sample]) -> Iterator[tuple[str, int, int]]:
    """Write shards; name, rows and tokens of each."""
    samples = iter(samples)
    number = 0
    while chunk := list(islice(samples, _SHARD_ROWS)):
        name = f"part-{number:05d}.parquet"
        _write_shard(work / name, chunk)
        yield name, len(chunk), sum(len(sample.input_ids) for sample in chunk)
        number += 1


def _write_shard(path: Path, samples: list[Sample]) -> None:
    kind = pa.list_(pa.int32())
    columns = {
        "input_ids": pa.array([sample.input_ids for sample in samples], kind),
        "documents": pa.array([sample.documents for sample in samples], kind),
    }
    if samples[0].labels is not None:
        columns["labels"] = pa.array([sample.labels for sample in samples], kind)
    with path.open("wb") as file:
        pq.write_table(pa.table(columns), file, row_group_size=_GROUP_ROWS)
        file.flush()
        os.fsync(file.fileno())
