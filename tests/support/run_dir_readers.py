"""The readers of run directories, each with a file that it reads and the functions that open it."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from service.adapters.storage.run_dirs import LocalRunDirs
from service.ports import LogOffset, LogSource
from tests.support.builders.run_dirs import DATASET, SPEC, STEP, WISH, data_file, events, lock_of, manifest_of, metadata
from train_loop.checkpoint.digest import digest_checkpoint, digest_step
from train_loop.checkpoint.export import huggingface
from train_loop.checkpoint.export.tensors import CheckpointTensors, saved_shapes
from train_loop.checkpoint.export.text_files import tokenizer_of
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.manifest import describe_file, has_its_files, newest_verified, verify
from train_loop.code.keep import keep_package
from train_loop.data.prepare.pointer import as_begun, as_in_parent, pinned_dataset
from train_loop.data.read_results import answer_page, read_page, read_tables
from train_loop.faults.watchdog import Watchdog
from train_loop.ray_train.worker import _prepared
from train_loop.run_dir import (
    Fence,
    JsonLines,
    RootMarker,
    RunDir,
    check_storage,
    expect_run_dir,
    forget_expected,
    read_lines,
    read_lines_after,
    read_place,
    write_run_marker,
)
from train_loop.spec import CodeSpec
from train_loop.telemetry.logs import open_log

KINDS = ("symbolic link", "FIFO", "folder", "link in the path")


def read_tensor(run_dir: RunDir) -> object:
    return list(CheckpointTensors(run_dir.checkpoint(STEP)).pieces("model.w"))


def load_checkpoint(run_dir: RunDir) -> object:
    values = {"model": {"w": torch.zeros(4)}}
    try:
        with warnings.catch_warnings():
            # DCP warns of loads in a single process.
            warnings.simplefilter("ignore")
            return load(values, storage_reader=CheckpointReader(run_dir.checkpoint(STEP)), no_dist=True)
    except CheckpointException as error:
        return error


def check_marker(run_dir: RunDir) -> None:
    expect_run_dir(run_dir.root)
    try:
        check_storage(run_dir.root / "x")
    finally:
        forget_expected(run_dir.root)


def follow(run_dir: RunDir, kind: str, rank: int | None = None) -> object:
    service = LocalRunDirs()
    return service.tail(str(run_dir.root), LogSource(kind, rank), LogOffset(1))  # type: ignore[arg-type]


class Reader(NamedTuple):
    """A file of a run directory, a call that reads it, and the functions in the way that open files."""

    path: Callable[[RunDir], Path]
    call: Callable[[RunDir], object]
    opens: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS


def of_root(name: str) -> Callable[[RunDir], Path]:
    return lambda run_dir: run_dir.root / name


FOLDERS = ("symbolic link",)
"""The replacements of a folder: a FIFO has no names, and the storage may be lost."""
TOP = ("symbolic link", "FIFO", "folder")
"""The replacements of a file that no folder of the run directory leads to."""
PATHS = "train_loop/run_dir/paths.py"
LINES = "train_loop/run_dir/lines.py"
FENCE = "train_loop/run_dir/fence.py"
MANIFEST = "train_loop/checkpoint/manifest.py"
TENSORS = "train_loop/checkpoint/export/tensors.py"
POINTER = "train_loop/data/prepare/pointer.py"
RESULTS = "train_loop/data/read_results.py"

READERS = {
    "spec": Reader(of_root("spec.json"), RunDir.spec, (f"{PATHS}:spec",), TOP),
    "parent": Reader(of_root("parent.json"), RunDir.parent, (f"{PATHS}:parent",), TOP),
    "marker": Reader(of_root("root.json"), RunDir.exists, (f"{PATHS}:exists",), TOP),
    "marker of storage": Reader(of_root("root.json"), check_marker, ("train_loop/run_dir/root.py:_read_marker",), TOP),
    "marker before a write": Reader(
        of_root("root.json"),
        lambda run: write_run_marker(run.root, RootMarker.new()),
        ("train_loop/run_dir/markers.py:write_run_marker",),
        TOP,
    ),
    "code": Reader(
        of_root("code.zip"),
        partial(keep_package, CodeSpec(package="/x.zip", model="m:M", loss="m:loss", batch="m:batch")),
        ("train_loop/code/keep.py:_copy",),
        TOP,
    ),
    "size": Reader(lambda run: run.attempt(1).size_file, lambda run: run.attempt(1).size(), (f"{PATHS}:size",)),
    "outcome": Reader(
        lambda run: run.attempt(1).outcome_file, lambda run: run.attempt(1).outcome(), (f"{PATHS}:_read",)
    ),
    "stop": Reader(lambda run: run.stop_file, RunDir.stop, (f"{PATHS}:_read",)),
    "attempts": Reader(of_root("attempts"), RunDir.attempts, (f"{PATHS}:attempts",), FOLDERS),
    "manifest": Reader(lambda run: run.checkpoint(STEP) / "manifest.json", RunDir.manifests, (f"{PATHS}:manifest_in",)),
    "checkpoints": Reader(of_root("checkpoints"), RunDir.manifests, (f"{PATHS}:checkpoint_folders",), FOLDERS),
    "checkpoint": Reader(lambda run: run.checkpoint(STEP), RunDir.manifests, (), FOLDERS),
    "pins": Reader(of_root("control/pins"), RunDir.pins, (f"{PATHS}:pins",), FOLDERS),
    "tokenizer": Reader(lambda run: run.data, RunDir.tokenizer, (f"{PATHS}:tokenizer",)),
    "fence": Reader(of_root("control/fence.json"), RunDir.fence, (f"{FENCE}:_written",)),
    "fence entries": Reader(of_root("control/fence"), RunDir.fence, (f"{FENCE}:_listed",), FOLDERS),
    "fence owner": Reader(
        of_root("control/fence/00000001.00000001"), lambda run: run.fence_owner(Fence(1, 1)), (f"{FENCE}:owner",)
    ),
    "events": Reader(
        events,
        lambda run: list(read_lines(run.attempt(1).events)),
        (f"{LINES}:read_all_lines",),
    ),
    "events after": Reader(
        events,
        lambda run: read_lines_after(run.attempt(1).events, 0),
        (f"{LINES}:size_appended", f"{LINES}:read_appended"),
    ),
    "appended event": Reader(
        events,
        lambda run: JsonLines(run.attempt(1).events, attempt=1).append(event="x"),
        (f"{LINES}:append",),
    ),
    "log of the driver": Reader(
        lambda run: run.attempt(1).driver_log,
        lambda run: open_log(run.attempt(1).driver_log),
        ("train_loop/telemetry/logs.py:open_log",),
    ),
    "stacks": Reader(
        lambda run: run.attempt(1).stacks_of(0, 1),
        lambda run: Watchdog(run.attempt(1).stacks_of(0, 1), seconds=1),
        ("train_loop/faults/watchdog.py:__init__",),
    ),
    "service's log": Reader(lambda run: run.attempt(1).driver_log, partial(follow, kind="log")),
    "service's events": Reader(lambda run: run.attempt(1).events, partial(follow, kind="events")),
    "service's observation": Reader(
        lambda run: run.attempt(1).outcome_file, lambda run: LocalRunDirs().observe(str(run.root), 1)
    ),
    "export status": Reader(
        lambda run: run.exports.folder(STEP, WISH).with_suffix(".json"),
        lambda run: run.exports.status(STEP, WISH, now=0.0),
        ("train_loop/run_dir/exports.py:_read", "train_loop/run_dir/exports.py:claim"),
    ),
    "export lock": Reader(
        lock_of,
        lambda run: huggingface._alone(run.exports.folder(STEP, WISH)).__enter__(),
        ("train_loop/checkpoint/export/huggingface.py:_alone",),
    ),
    "sink": Reader(
        lambda run: run.sink_file("wandb"),
        lambda run: read_place(run.sink_file("wandb")),
        ("train_loop/run_dir/sinks.py:read_place",),
    ),
    "data pointer of a worker": Reader(
        lambda run: run.data, lambda run: _prepared(run.data), ("train_loop/ray_train/worker.py:_prepared",)
    ),
    "data pointer of a driver": Reader(
        lambda run: run.eval_data,
        lambda run: pinned_dataset(SPEC.run, run.eval_data),
        (f"{POINTER}:pinned_dataset",),
    ),
    "data pointer at the start": Reader(
        lambda run: run.data, lambda run: as_begun(DATASET, run.data), (f"{POINTER}:as_begun",)
    ),
    "data pointer of the parent": Reader(
        lambda run: run.data, lambda run: as_in_parent(DATASET, run), (f"{POINTER}:as_in_parent",)
    ),
    "data pointer of an export": Reader(
        lambda run: run.data,
        lambda run: tokenizer_of(SPEC.run, run),
        ("train_loop/checkpoint/export/text_files.py:tokenizer_of",),
    ),
    "page of results": Reader(
        lambda run: run.results.shard(0),
        lambda run: read_page(run, after=None, limit=1, most_bytes=1),
        (f"{RESULTS}:_open",),
    ),
    "page of the helper": Reader(
        lambda run: run.results.shard(0),
        lambda run: answer_page({"run_dir": str(run.root), "after": None, "limit": 1, "most_bytes": 1}).decode(),
    ),
    "all results": Reader(
        lambda run: run.results.shard(0), lambda run: list(read_tables(run)), (f"{RESULTS}:read_tables",)
    ),
    "shards": Reader(
        of_root("results"), lambda run: run.results.shards(), ("train_loop/run_dir/results.py:shards",), FOLDERS
    ),
    "verification": Reader(
        data_file,
        lambda run: verify(run.checkpoint(STEP), manifest_of(run)),
        (f"{MANIFEST}:_fault",),
    ),
    "verification of the newest": Reader(data_file, newest_verified),
    "description": Reader(
        data_file,
        lambda run: describe_file(data_file(run)),
        (f"{MANIFEST}:describe_file", f"{MANIFEST}:open_checkpoint_file"),
    ),
    "sizes": Reader(
        data_file, lambda run: has_its_files(run.checkpoint(STEP), manifest_of(run)), (f"{MANIFEST}:has_its_files",)
    ),
    "digests": Reader(data_file, lambda run: digest_step(run, STEP)),
    "digests of a folder": Reader(data_file, lambda run: digest_checkpoint(run.checkpoint(STEP))),
    "tensor of an export": Reader(
        data_file, read_tensor, (f"{TENSORS}:_rows_of", f"{TENSORS}:_bytes_of", f"{TENSORS}:_pieces_of")
    ),
    "metadata of an export": Reader(metadata, read_tensor, (f"{TENSORS}:_read_metadata",)),
    "shapes": Reader(metadata, lambda run: saved_shapes(run.checkpoint(STEP))),
    "metadata of a resume": Reader(
        metadata,
        lambda run: CheckpointReader(run.checkpoint(STEP)).read_metadata(),
        ("train_loop/checkpoint/files/reader.py:read_metadata",),
    ),
    "tensors of a resume": Reader(
        data_file,
        load_checkpoint,
        ("train_loop/checkpoint/files/reader.py:_mapped",),
    ),
}
