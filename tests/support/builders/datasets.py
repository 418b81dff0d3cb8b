"""Datasets made of Parquet files that a test has written."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from train_loop.data.dataset import Dataset, Part, ShardFile
from train_loop.data.prepare.cache import (
    evaluation_spec,
    find_dataset,
    find_part,
    fingerprint,
    list_sources,
    tokenizer_home,
)
from train_loop.data.prepare.encode import TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.packing import Document, one_per_sample
from train_loop.data.prepare.rows import cut, read_piece
from train_loop.data.shards import write_part
from train_loop.model.folder import model_shape
from train_loop.spec import JobSpec


def parquet_dataset(*paths: Path, length: int, tokens: int = 0, **parts: Any) -> Dataset:
    """Return a dataset of the rows of files; `parts` names the columns besides input_ids."""
    files = [ShardFile(path=str(p), rows=pq.read_metadata(p).num_rows, size=p.stat().st_size) for p in paths]
    part = Part(fingerprint="x", files=tuple(files), tokens=tokens, **parts)
    return Dataset(fingerprint="x", parts=(part,), sequence_length=length)


def prepare_tokens(job: JobSpec, cache: Path) -> None:
    """Prepare the rows of a spec and of its evaluation that a cache does not have yet, without Ray."""
    sources = list_sources(job)
    tokenizer = tokenizer_home(job, sources, cache)
    rules = None if tokenizer is None else TextRules.of_spec(job, tokenizer)
    for source in sources:
        if find_part(job, source, tokenizer, cache) is not None:
            continue
        columns, vocab = source.columns, model_shape(job.model).vocab
        rows = [row for piece in cut(source.files, 2**20) for chunk in read_piece(piece, columns) for row in chunk.rows]
        fit, documents = Fit.of(job, columns, rules), list[Document]()
        for one in encode_rows(rows, columns, vocab=vocab, rules=rules, head=job.model.label_head):
            assert isinstance(one, Document), one
            documents.append(fit(one)[0])
        folder = cache / fingerprint(job, source, tokenizer)
        folder.mkdir(parents=True)
        part = write_part(one_per_sample(documents, job.data.sequence_length), folder)
        (folder / "dataset.json").write_text(part.model_dump_json())
    of_eval = evaluation_spec(job, find_dataset(job, cache))
    if of_eval is not None:
        prepare_tokens(of_eval, cache)
