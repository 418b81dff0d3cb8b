"""Writes the tensors of a model as safetensors files, in the order in which they are read."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from train_loop.checkpoint.export.safetensors import Kind, Shard, ShardFile, file_names, plan_shards, write_index
from train_loop.checkpoint.optimizer_state import FACTS, STEM
from train_loop.errors import UserError
from train_loop.model.weight_map import some
from train_loop.run_dir import write_durably
from train_loop.weights.entries import Entry, read_entries
from train_loop.weights.inputs import Inputs
from train_loop.weights.names import choose
from train_loop.weights.optimizer import split_off, state_names
from train_loop.weights.result import Converted

_TIMES_LARGER = 2
"""Maximum size of the result, relative to that of the files: tied tensors are written twice."""
_SMALL = 2**20


def write_weights(inputs: Inputs, folder: Path, *, shard_bytes: int, entry: str | None = None) -> Converted:
    """Write the tensors of a model into a folder. The files are read twice, and held one piece at a time.

    Raises UserError, CheckpointError, OSError.
    """
    entries = [one for one, _ in read_entries(inputs)]
    _check_index(inputs, [".".join(one.path) for one in entries])
    model, states, facts = split_off(entries) if entry is None else (entries, [], None)
    chosen = choose(model, entry)
    kinds, state_kinds = _kinds(model, chosen.names), _kinds(states, state_names(states))
    size = sum(kind.nbytes for kind in kinds.values())
    _check_size(size + sum(kind.nbytes for kind in state_kinds.values()), sum(inputs.sizes), folder)
    shards = plan_shards(kinds, limit=shard_bytes)
    _write(inputs, folder, chosen.names, shards, "model")
    if facts is not None:
        _write(inputs, folder, state_names(states), plan_shards(state_kinds, limit=shard_bytes), STEM)
        write_durably(folder / FACTS, facts.model_dump_json(indent=2))
        chosen.notes.append("wrote the optimizer state, too: name the new folder also in training.optimizer_state")
    floats = {str(kind.dtype).removeprefix("torch.") for kind in kinds.values() if kind.dtype.is_floating_point}
    return Converted(
        folder=str(folder),
        tensors=len(kinds),
        bytes=size,
        files=file_names(shards),
        dtype=floats.pop() if len(floats) == 1 else None,
        notes=chosen.notes,
    )


def _check_index(inputs: Inputs, names: Sequence[str]) -> None:
    missing = sorted(inputs.files_by_tensor.keys() - set(names))
    if missing:
        raise UserError(
            f"the index names tensors that the files do not contain: {some(missing)}; copy the folder again"
        )


def _check_size(size: int, stored: int, folder: Path) -> None:
    # A tensor of a few bytes can claim any size by repeating them.
    if size > _TIMES_LARGER * stored + _SMALL:
        raise UserError(
            f"the tensors have {size} bytes, and the files {stored}; expanded tensors are not converted, save copies "
            "of them: tensor.contiguous()"
        )
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(f"the tensors need {size} bytes in {folder.parent}, which has {free} free; free some space")


def _kinds(entries: Sequence[Entry], names: dict[tuple[str, ...], str]) -> dict[str, Kind]:
    return {names[one.path]: one.kind for one in entries if one.kind is not None and one.path in names}


def _write(inputs: Inputs, folder: Path, names: dict[tuple[str, ...], str], shards: Sequence[Shard], stem: str) -> None:
    """Write tensors and their index. The files follow each other in the order of the tensors."""
    write_index(folder, shards, stem)
    files = [folder / name for name in file_names(shards, stem)]
    places = {name: (file, kind) for file, shard in enumerate(shards) for name, kind in shard.items()}
    number, left = -1, dict(places)
    open_file: ShardFile | None = None
    for one, pieces in read_entries(inputs):
        name = names.get(one.path)
        if name is None:
            continue
        file, kind = left.pop(name, (number, None))
        _check_same(one, kind)
        if file != number or open_file is None:
            if open_file is not None:
                open_file.close()
            number, open_file = file, ShardFile(files[file], shards[file])
        open_file.put(name, pieces())
    if open_file is not None:
        open_file.close()
    if left:
        raise UserError(f"the files have changed while they were read: {some(list(left))} is gone; convert again")


def _check_same(one: Entry, kind: Kind | None) -> None:
    if kind is None or one.kind != kind:
        raise UserError(f"the files have changed while they were read: {'.'.join(one.path)} is another; convert again")
