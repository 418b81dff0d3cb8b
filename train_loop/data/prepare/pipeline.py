"""Raw files → prepared samples in the cache: read and tokenise with Ray Data, pack, write shards, commit.

A prepared source has a fingerprint of all that determines its content. All jobs with the same fingerprint share it. One
rename gives the folder its final name, so a folder under that name is complete.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from train_loop.data.dataset import Dataset, Part
from train_loop.data.own_columns import own_part
from train_loop.data.own_files import write_own
from train_loop.data.prepare.boundaries import Boundaries, no_end_token
from train_loop.data.prepare.build_lock import build_once
from train_loop.data.prepare.cache import (
    Source,
    find_part,
    fingerprint,
    join,
    library_versions,
    list_sources,
    load_part,
    tokenizer_home,
)
from train_loop.data.prepare.cells import is_text
from train_loop.data.prepare.encode import Encoded, TextRules, encode_rows
from train_loop.data.prepare.fit import Fit, check_rows, explain_cut
from train_loop.data.prepare.largest_read import largest_read
from train_loop.data.prepare.packing import Document, one_per_sample, pack
from train_loop.data.prepare.progress import Progress, Report
from train_loop.data.prepare.rows import Piece, Row, cut, read_piece
from train_loop.data.prepare.sources import list_files
from train_loop.data.ray_context import configure_ray_data, numbers, start_ray
from train_loop.data.shards import write_part
from train_loop.data.text.chat import load_chat_templates
from train_loop.data.text.letter_case import check_letter_case
from train_loop.data.text.tokenizer import load_tokenizer, train_tokenizer
from train_loop.errors import DataError
from train_loop.model.folder import model_shape
from train_loop.plan import TOKENIZER_TEXT, task_reservation
from train_loop.run_dir import write_durably
from train_loop.spec import MEMORY, ColumnsSpec, JobSpec
from train_loop.system.memory_limit import is_limited

_TASK_BYTES = (2**20, 32 * 2**20)
"""Approximate minimum and maximum size that a task reads, in bytes."""
_BLOCK_BYTES = 32 * 2**20
"""Size of the blocks that a task returns, in bytes, however much it reads."""


def prepare(spec: JobSpec, cache: Path, report: Report) -> Dataset:
    """Return the samples of a spec; prepare them unless an earlier job has. Raises DataError."""
    sources = list_sources(spec)
    tokenizer = _tokenizer(spec, sources, cache, report)
    for source in sources:
        _warn_of_tools(spec, source, tokenizer, report)
    parts = [_part(spec, source, tokenizer, cache, report) for source in sources]
    for source, part in zip(sources, parts, strict=True):
        if part.sample_without_end is not None:
            cause = explain_cut(part.on_long_rows, part.long_rows)
            report("warning", message=f"{source}: {no_end_token(part.sample_without_end)}{cause}")
    return join(spec, parts, tokenizer)


def _warn_of_tools(spec: JobSpec, source: Source, tokenizer: Path | None, report: Report) -> None:
    """Report a warning if the chat template does not use the source's column of tools."""
    column = source.columns.tools
    if column is None or tokenizer is None:
        return
    if not load_chat_templates(str(tokenizer), spec.data.chat_template).use_tools:
        report("warning", message=f"{source}: the chat template does not use the tools of column {column!r}")


def _part(spec: JobSpec, source: Source, tokenizer: Path | None, cache: Path, report: Report) -> Part:
    part = find_part(spec, source, tokenizer, cache)
    if part is not None:
        return part
    folder = cache / fingerprint(spec, source, tokenizer)

    def build(work: Path) -> None:
        report("preparing", source=str(source), files=len(source.files), bytes=sum(f.size for f in source.files))
        made = _build(work, spec, source, tokenizer, report).model_copy(update={"fingerprint": folder.name})
        now = replace(source, files=tuple(list_files(source.spec)))
        if fingerprint(spec, now, tokenizer) != folder.name:
            # The samples may mix old and new files, so they must not get the fingerprint of either.
            raise DataError(
                f"{source} or its tokenizer changed during preparation; restart when its files no longer change"
            )
        write_durably(work / "dataset.json", made.model_dump_json(indent=2))

    build_once(folder, build, is_whole=lambda: load_part(folder) is not None, report=report)
    part = load_part(folder)
    assert part is not None, f"{folder} was just committed"
    return part


def _build(work: Path, spec: JobSpec, source: Source, tokenizer: Path | None, report: Report) -> Part:
    if source.columns.own:
        part, _ = own_part(str(source), source.files, source.columns.own, fingerprint=work.name)
        return write_own(part, source.files, work)
    tasks = _tasks(source)
    progress = Progress(report, [sum(piece.bytes for piece in task) for task in tasks])
    documents = _documents(tasks, spec, source, tokenizer, progress)
    boundaries = None
    if not source.columns.tokenised and tokenizer is not None:
        boundaries = Boundaries(load_tokenizer(str(tokenizer), needs_eos=spec.model.ends_text))
        documents = _seen_by(boundaries, documents)
    put_together = pack if spec.data.packing else one_per_sample
    part = write_part(put_together(documents, spec.data.sequence_length), work)
    progress.finish()
    if not part.files:
        raise DataError(f"{source} holds no tokens{_why_none(progress)}; an empty dataset cannot be trained on")
    found: dict[str, Any] = {"on_long_rows": spec.data.long_rows_of(source.columns)}
    if boundaries is not None:
        found |= {"libraries": library_versions(), "begins_with_bos": boundaries.begins_with_bos}
        found |= {"sample_without_end": boundaries.sample_without_end if source.columns.messages else None}
    return part.model_copy(update=progress.counts | found)


def _seen_by(boundaries: Boundaries, documents: Iterator[Document]) -> Iterator[Document]:
    for document in documents:
        boundaries.see(document)
        yield document


def _why_none(progress: Progress) -> str:
    """Return the reasons why rows were dropped, as the middle of a sentence."""
    dropped, untrained = progress.fates["dropped"], progress.fates["untrained"]
    reasons = [
        *([f"{dropped} were dropped as longer than sequence_length (data.on_long_rows)"] if dropped else []),
        *([f"{untrained} have no token that is trained"] if untrained else []),
    ]
    return f": of {progress.rows} rows, {' and '.join(reasons)}" if reasons else ""


def _tasks(source: Source) -> list[list[Piece]]:
    """Return the pieces for each task: many small files, or a part of a large one."""
    start_ray()
    least, most = _TASK_BYTES
    total, cpus = sum(file.size for file in source.files), int(ray.cluster_resources().get("CPU", 1))
    # Several tasks per CPU, so that all CPUs finish together; not many, as Ray Data takes 0.2 s to hand out the next.
    size = max(least, min(most, total // (4 * cpus)))
    tasks: list[list[Piece]] = []
    room = 0
    for piece in cut(source.files, size):
        if piece.bytes > room:
            tasks.append([])
            room = size
        tasks[-1].append(piece)
        room -= piece.bytes
    return tasks


def _reserved(spec: JobSpec, source: Source) -> dict[str, int]:
    """Return the memory that each task reserves under an embedded Ray, so that other jobs keep theirs."""
    if MEMORY not in spec.scaling.resources_per_worker or not is_limited(os.environ):
        return {}
    return {MEMORY: task_reservation(spec, largest_read([("", source.spec, source.columns)]))}


def _documents(
    tasks: list[list[Piece]], spec: JobSpec, source: Source, tokenizer: Path | None, progress: Progress
) -> Iterator[Document]:
    """Yield all documents in the order of the files, read and tokenised by Ray Data."""
    if not tasks:
        return
    columns = source.columns
    configure_ray_data(block_bytes=_BLOCK_BYTES)
    rules = None if tokenizer is None or columns.tokenised else TextRules.of_spec(spec, tokenizer)
    encode = partial(
        encode_rows, columns=columns, vocab=model_shape(spec.model).vocab, rules=rules, head=spec.model.label_head
    )
    options = {"tasks": tasks, "columns": columns, "encode": encode, "skip": spec.data.on_bad_rows == "skip"}
    options |= {"fit": Fit.of(spec, columns, rules)}
    reserved = _reserved(spec, source)
    blocks = numbers(len(tasks), **reserved).map_batches(_encode_task, batch_size=None, fn_kwargs=options, **reserved)
    for table in blocks.iter_batches(batch_format="pyarrow", batch_size=None):
        yield from _from_table(table.combine_chunks(), tasks, progress)


def _encode_task(
    batch: dict[str, NDArray[np.int64]],
    tasks: list[list[Piece]],
    columns: ColumnsSpec,
    encode: Callable[[list[Row]], list[Encoded]],
    skip: bool,
    fit: Fit,
) -> Iterator[pa.Table]:
    """Yield the documents of a task's pieces, one table per chunk of rows."""
    # The task has one CPU: more threads would use the CPUs of other tasks and take more time in total.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for task in batch["id"].tolist():
        # The result needs columns even if the task has no rows.
        yield _to_table([], fit, task=task, piece=0, read=0)
        before = 0
        for number, piece in enumerate(tasks[task]):
            for chunk in read_piece(piece, columns):
                encoded = encode(chunk.rows)
                check_rows(encoded, [(piece.file, row.place) for row in chunk.rows], fit, skip=skip)
                yield _to_table(encoded, fit, task=task, piece=number, read=before + chunk.read)
            before += piece.bytes


def _to_table(encoded: Sequence[Encoded], fit: Fit, **numbers: int) -> pa.Table:
    """Return a table with a row per document or bad row; `numbers` are columns with one value."""
    nothing = np.empty(0, np.int32)
    fitted = [fit(row) if isinstance(row, Document) else (Document(nothing), None) for row in encoded]
    documents = [document for document, _ in fitted]
    labels = [nothing if document.labels is None else document.labels for document in documents]
    return pa.table(
        {
            **{name: pa.array([number] * len(encoded), pa.int64()) for name, number in numbers.items()},
            "place": pa.array([getattr(row, "place", None) for row in encoded], pa.int64()),
            "reason": pa.array([getattr(row, "reason", None) for row in encoded], pa.string()),
            "fate": pa.array([fate for _, fate in fitted], pa.string()),
            "input_ids": _lists([document.input_ids for document in documents]),
            "labels": _lists(labels),
            "ends": pa.array([sorted(document.ends) for document in documents], pa.list_(pa.int32())),
            "weight": pa.array([document.weight for document in documents], pa.float32()),
            "target": pa.array([document.target for document in documents], pa.float32()),
            "sizes": pa.array([list(document.sizes) for document in documents], pa.list_(pa.int32())),
        }
    )


def _lists(values: list[NDArray[np.int32]]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    flat = np.concatenate(values) if values else np.empty(0, np.int32)
    return pa.LargeListArray.from_arrays(offsets, pa.array(flat, pa.int32()))


def _from_table(table: pa.Table, tasks: list[list[Piece]], progress: Progress) -> Iterator[Document]:
    for task, piece, place, reason in zip(
        *(table[name].to_pylist() for name in ("task", "piece", "place", "reason")), strict=True
    ):
        if reason is not None:
            progress.skipped(tasks[task][piece].file, place, reason)
    progress.fitted(fate for fate in table["fate"].to_pylist() if fate is not None)
    ids, labels = (_arrays(table[name]) for name in ("input_ids", "labels"))
    rest = zip(*(table[name].to_pylist() for name in ("weight", "target", "ends", "sizes")), strict=True)
    for tokens, its, (weight, target, ends, sizes) in zip(ids, labels, rest, strict=True):
        if len(tokens):
            yield Document(tokens, its if len(its) else None, weight, target, frozenset(ends), tuple(sizes))
    if len(ids):
        task, read = (table[name][-1].as_py() for name in ("task", "read"))
        progress.advance(len(ids), tokens=sum(map(len, ids)), task=task, read=read)


def _arrays(column: pa.ChunkedArray) -> list[NDArray[np.int32]]:
    array = column.combine_chunks()
    offsets, flat = array.offsets.to_numpy(), array.values.to_numpy()
    return [flat[start:stop] for start, stop in pairwise(offsets)]


def _tokenizer(spec: JobSpec, sources: list[Source], cache: Path, report: Report) -> Path | None:
    """Return the folder of the tokenizer; train it on the data if the spec names none. None if it is not needed."""
    folder = tokenizer_home(spec, sources, cache)
    if folder is None:
        return None
    vocab, masked = model_shape(spec.model).vocab, spec.model.masked is not None

    def train(work: Path) -> None:
        report("training_tokenizer", vocab_size=vocab)
        train_tokenizer(_some_text(sources), vocab_size=vocab, folder=work, masks=masked)

    if folder.parent == cache:
        build_once(folder, train, is_whole=(folder / "tokenizer_config.json").is_file, report=report)
    loaded = load_tokenizer(str(folder), needs_eos=spec.model.ends_text)
    loaded.check_fits(vocab)
    check_letter_case(spec, loaded)
    return folder


def _some_text(sources: list[Source]) -> Iterator[str]:
    """Yield text of each source, with the same maximum of characters per source."""
    for source in sources:
        left = TOKENIZER_TEXT // len(sources)
        for text in _texts(source):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def _texts(source: Source) -> Iterator[str]:
    columns = source.columns
    for piece in cut(source.files, _TASK_BYTES[1]):
        for chunk in read_piece(piece, columns):
            for row in chunk.rows:
                cells = (row.values.get(name) for name in columns.texts)
                # Encoding reports cells that are not text, with their places.
                yield from filter(is_text, cells)
