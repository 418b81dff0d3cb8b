"""`python -m train_loop.checkpoint.export RUN_DIR --step N`: export a checkpoint as a Hugging Face folder.

It runs in a separate process, during or after training, and holds only some megabytes of weights at a time.
"""

import argparse
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from train_loop.checkpoint.export.adapters import Adapted, MergedTensors, open_adapters
from train_loop.checkpoint.export.measured import describe_adapters
from train_loop.checkpoint.export.optimizer import SavedStates, find_states
from train_loop.checkpoint.export.safetensors import Kind, Shard, ShardFile, file_names, plan_shards, write_index
from train_loop.checkpoint.export.status import Progress, finish, report_status
from train_loop.checkpoint.export.tensors import CheckpointTensors, Piece, whole
from train_loop.checkpoint.export.text_files import tokenizer_of, write_texts, write_tokenizer
from train_loop.checkpoint.manifest import find, find_verified
from train_loop.checkpoint.weights import find_weights, stored_buffers
from train_loop.code.use import with_own_code
from train_loop.errors import CheckpointError, UserError
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.embeddings import write_sentence_configs
from train_loop.model.families.choose import family_of
from train_loop.model.families.family import Split, Unchanged
from train_loop.model.lora.peft_config import WEIGHTS
from train_loop.run_dir import (
    ExportStatus,
    ExportWish,
    RunDir,
    append_regular,
    copy_files,
    expect_run_dir,
    is_remote,
    make_folder,
    sync,
    wish_of,
)
from train_loop.spec import JobSpec

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""Default maximum size of a weights file in bytes, as in transformers."""


def main() -> int:
    """Export a checkpoint. Return 0, or 1 after printing the reason for a failure."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.checkpoint.export", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="dtype of the weights [model.dtype of the run]")
    parser.add_argument(
        "--weights",
        choices=("model", "ema"),
        default="model",
        help="weights to export; ema: their average [%(default)s]",
    )
    parser.add_argument(
        "--form",
        choices=("adapter", "merged", "dequantized"),
        help="form of a run's adapters [adapter]; merged: added to the weights; dequantized: to restored ones, of a "
        "run with model.quantize_base",
    )
    parser.add_argument(
        "--with", choices=["optimizer"], dest="include", help="what to write besides the model, for a run to start from"
    )
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="maximum bytes per file [%(default)s]")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    run_dir = RunDir.at(arguments.run_dir)
    expect_run_dir(run_dir.root)
    try:
        wish = wish_of(
            run_dir.spec().model,
            dtype=arguments.dtype,
            weights=arguments.weights,
            form=arguments.form,
            include=arguments.include,
        )
        folder = export(run_dir, arguments.step, wish, shard_bytes=arguments.shard_bytes)
    except (ValueError, CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


def export(run_dir: RunDir, step: int, wish: ExportWish, *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Export a checkpoint as a Hugging Face folder and return its path; an existing export is reused.

    Raises UserError if the run has no such checkpoint or weights, CheckpointError if it does not verify, OSError.
    """
    folder = run_dir.exports.folder(step, wish)
    if run_dir.exports.status(step, wish, now=time.time()) is None and not folder.exists():
        # Check the step before the export creates any file.
        find(run_dir, step)
    with _alone(folder):
        before = run_dir.exports.status(step, wish, now=time.time())
        if before is not None and before.state == "done":
            return folder
        if not is_remote(folder) and folder.exists():
            # A folder gets its name when it is complete: its process died before it wrote the event or the status.
            finish(run_dir, before or ExportStatus(step=step, wish=wish, state="running", time=time.time()))
            return folder
        with (
            # Without its folder, a local export begins again; objects may be complete.
            report_status(run_dir, step, wish, before if is_remote(folder) else None) as progress,
            _kept(run_dir, step, wish),
            _workplace(folder) as work,
        ):
            source = _open(run_dir, step, wish)
            states = _states(source, run_dir, step) if wish.include else None
            progress.total = states.values if states is not None else 0
            _write_weights(source, work, wish, progress=progress, shard_bytes=shard_bytes)
            if states is not None:
                states.write(work, progress, shard_bytes=shard_bytes)
            if wish.form == "adapter":
                write_tokenizer(source.spec, source.anatomy, source.tokenizer, work)
                write_sentence_configs(source.anatomy.model, work)
            else:
                write_texts(source.spec, source.anatomy, source.tokenizer, work, wish.dtype)
            if source.adapted is not None:
                progress.difference = describe_adapters(source.adapted, work, step, wish)
            progress.complete()
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock, so that the same export runs once. Object storage has no lock: there both write the same objects."""
    if is_remote(folder):
        yield
        return
    make_folder(folder.parent)
    with os.fdopen(append_regular(folder.with_name(f".{folder.name}.lock"), below=folder.parent.parent)) as lock:
        with suppress(OSError):
            # Some network file systems have no locks: then two processes make the same export concurrently.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    """Yield a local folder that becomes the requested one: by a rename, or by a copy on object storage."""
    if is_remote(folder):
        with tempfile.TemporaryDirectory() as work:
            yield Path(work)
            copy_files(Path(work), folder)
        return
    for left in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    beside = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex}")
    make_folder(beside)
    yield beside
    sync(beside)
    beside.rename(folder)
    sync(folder.parent)


@dataclass(frozen=True)
class Source:
    """A verified checkpoint, and its model without weights."""

    spec: JobSpec
    anatomy: Anatomy
    saved: CheckpointTensors | MergedTensors
    names: dict[str, str]
    """Key in the checkpoint of each weight and buffer of the model."""
    parts: Mapping[str, Split]
    """The stored tensors of each of them."""
    tokenizer: Path | None
    """Folder of the run's tokenizer; None if the run has none."""
    adapted: Adapted | None = None
    """The checkpoint of a run with adapters."""


def _open(run_dir: RunDir, step: int, wish: ExportWish) -> Source:
    spec = with_own_code(run_dir.spec().run, run_dir)
    manifest = find_verified(run_dir, step)
    if fault := wish.fault(spec.model) or wish.fault_of_states(spec):
        raise UserError(fault)
    if wish.weights == "ema" and spec.training.ema_decay is None:
        raise UserError(
            "the run has no average of its weights (training.ema_decay is not set); export with weights=model"
        )
    anatomy, saved = family_of(spec).build(spec.model), CheckpointTensors(run_dir.checkpoint(step))
    if spec.model.lora is not None:
        adapted = open_adapters(spec, anatomy, saved, manifest, wish.weights)
        return _of_adapters(adapted, wish, tokenizer_of(spec, run_dir))
    # Under transformers' names; of the buffers, only those that transformers saves.
    places = find_weights(anatomy, saved, wish.weights)
    parts = _public(anatomy, {name: tuple(saved.shape(place)) for name, place in places.items()})
    return Source(spec, anatomy, saved, places, parts, tokenizer_of(spec, run_dir))


def _states(source: Source, run_dir: RunDir, step: int) -> SavedStates:
    return find_states(source.spec, source.anatomy.model, find(run_dir, step), run_dir.checkpoint(step))


def _public(anatomy: Anatomy, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Split]:
    """Return how the public layout stores the tensors of a model, given by name and shape."""
    unchanged: dict[str, Split] = {name: Unchanged(name, shape) for name, shape in shapes.items()}
    return unchanged | dict(anatomy.family.splits(anatomy.model, shapes))


def _of_adapters(adapted: Adapted, wish: ExportWish, tokenizer: Path | None) -> Source:
    """Return the tensors that an export in this form writes."""
    if wish.form == "adapter":
        saved = adapted.saved
        names = {name: adapted.places[name] for name in adapted.trained}
        of_peft: dict[str, Split] = {
            name: Unchanged(adapted.trained[name], tuple(saved.shape(place))) for name, place in names.items()
        }
        return Source(adapted.spec, adapted.plain, saved, names, of_peft, tokenizer, adapted)
    anatomy, merged = adapted.plain, MergedTensors(adapted)
    parts = _public(anatomy, {name: tuple(merged.shape(name)) for name in merged.names})
    return Source(adapted.spec, anatomy, merged, {name: name for name in merged.names}, parts, tokenizer, adapted)


def _write_weights(source: Source, folder: Path, wish: ExportWish, *, progress: Progress, shard_bytes: int) -> None:
    saved, buffers = source.saved, stored_buffers(source.anatomy.model)
    # Buffers keep their dtype: some are counts, and for some half precision is too coarse.
    homes = {stored: name for name, parts in source.parts.items() for stored in parts.shapes}
    tensors = {
        stored: Kind(torch.Size(shape), saved.dtype(source.names[name]) if name in buffers else DTYPES[wish.dtype])
        for name, parts in source.parts.items()
        for stored, shape in parts.shapes.items()
    }
    stem = "model" if wish.form != "adapter" else WEIGHTS
    shards = plan_shards(tensors, limit=shard_bytes if wish.form != "adapter" else sys.maxsize)
    progress.total += sum(kind.shape.numel() for kind in tensors.values())
    for name, shard in zip(file_names(shards, stem), shards, strict=True):
        _write_shard(source, folder / name, shard, dict.fromkeys(homes[stored] for stored in shard), progress)
    write_index(folder, shards, stem)


def _write_shard(source: Source, path: Path, shard: Shard, names: Iterable[str], progress: Progress) -> None:
    """Write a file from the model's tensors of these names. A tensor of which two files hold parts is read twice."""
    file = ShardFile(path, shard)
    for name in names:
        split, pieces = source.parts[name], source.saved.pieces(source.names[name])
        for piece in pieces if split.by_row else [whole(pieces)]:
            for stored, rows in split.cut(piece.values, piece.offsets[0] if piece.offsets else 0).items():
                if stored in shard:
                    place = (rows.first, *(0 for _ in rows.values.shape[1:]))[: rows.values.ndim]
                    file.put(stored, progress.counted(iter([Piece(place, rows.values)])))
    file.close()


@contextmanager
def _kept(run_dir: RunDir, step: int, wish: ExportWish) -> Iterator[None]:
    """Pin the checkpoint in the body, so that it is not removed."""
    run_dir.pin(step, by=wish.pinned_by)
    try:
        yield
    finally:
        run_dir.unpin(step, by=wish.pinned_by)
