"""Conversion of weights of any origin to a Hugging Face folder with safetensors, which a job can start from."""

import shutil
import uuid
from pathlib import Path
from typing import NamedTuple

from train_loop.checkpoint.export.text_files import write_run_configs
from train_loop.errors import UserError
from train_loop.model.build import DTYPES
from train_loop.run_dir import RunDir, make_folder, sync
from train_loop.weights.confine import run_confined
from train_loop.weights.inputs import Inputs, find_inputs, run_dir_at, text_files
from train_loop.weights.result import Converted
from train_loop.weights.write import write_weights

SHARD_BYTES = 5 * 10**9
MEMORY_MIB = 1024
_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


class Options(NamedTuple):
    """Choices of a conversion."""

    entry: str | None = None
    """Key of the state dict in the file; None to find it."""
    config: Path | None = None
    """Folder of a model, or a run directory, with config and tokenizer; None for the folder of the weights."""
    shard_bytes: int = SHARD_BYTES
    memory_mib: int = MEMORY_MIB
    """Memory of the process that reads, besides the files that it maps."""


def convert(source: Path, target: Path, options: Options) -> Converted:
    """Convert the weights at `source` to a new folder, which gets its name when it is complete.

    Raises UserError, CheckpointError, OSError; then nothing is left.
    """
    inputs = find_inputs(source)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} already exists; choose a new folder, or remove it")
    make_folder(target.parent)
    work = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex}")
    work.mkdir()
    try:
        done = _read_and_write(inputs, work, options)
        notes = [*done.notes, *_write_configs(inputs, work, options, done)]
        sync(work)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    sync(target.parent)
    files = sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file())
    return done.model_copy(update={"folder": str(target), "files": files, "notes": notes})


def _read_and_write(inputs: Inputs, work: Path, options: Options) -> Converted:
    found = run_confined(
        lambda: write_weights(inputs, work, shard_bytes=options.shard_bytes, entry=options.entry).model_dump(),
        readable=inputs.pickles if inputs.checkpoint is None else [inputs.checkpoint],
        writable=work,
        largest=max(inputs.sizes, default=0),
        memory_bytes=options.memory_mib << 20,
    )
    return Converted.model_validate(found)


def _write_configs(inputs: Inputs, work: Path, options: Options, done: Converted) -> list[str]:
    """Write config and tokenizer next to the weights. Return the missing files."""
    home = options.config or inputs.home
    run_dir = inputs.run_dir if options.config is None else run_dir_at(options.config)
    if run_dir is not None:
        return _write_those_of_run(run_dir, work, done)
    files = text_files(home)
    if not files and options.config is not None:
        raise UserError(f"config.json not found in {home}; give a model's folder, or a run directory")
    for name, content in files.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_bytes(content)
    if files:
        return []
    return ["config.json not found next to the weights; a job needs it: copy it into the folder, or give --config"]


def _write_those_of_run(run_dir: RunDir, work: Path, done: Converted) -> list[str]:
    spec = run_dir.spec()
    if spec.code is not None:
        raise UserError(
            f"the run in {run_dir.root} has its own code (code); use `trainshed export`, or "
            "python -m train_loop.checkpoint.export"
        )
    dtype = _NAMES.get(done.dtype or "", spec.model.dtype)
    write_run_configs(spec.run, run_dir, work, dtype=dtype)
    return [f"wrote the config of the run in {run_dir.root}"]
