"""Resumption from the newest checkpoint that verifies, or start from another run's, at any world size."""

import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.select import agree_on_newest, prove_parent
from train_loop.checkpoint.state_dict import put_back, rng_key, tensors_of
from train_loop.errors import DataError
from train_loop.loop.build import Run
from train_loop.loop.state import LossWindow, seed_generators, set_rng_state
from train_loop.optim import go_to
from train_loop.run_dir import Manifest, Parent

Values = dict[str, Any]


def restore(run: Run) -> None:
    """Load the state of a fresh run from a checkpoint, or leave it at its start. A collective call.

    The checkpoint is the newest of this run that verifies, or else that of the parent run. Newer checkpoints that do
    not verify are reported and skipped. Nothing is unpickled before its hash was checked.
    """
    manifest, parent = agree_on_newest(run), run.parent
    if manifest is not None:
        _check_same_data(run, manifest)
        _resume(run, manifest)
    elif parent is not None:
        _continue(run, parent)
    else:
        seed_generators(run.spec.training.seed, step=0, rank=run.mesh.rank)


def _resume(run: Run, manifest: Manifest) -> None:
    """Load the full state from a checkpoint of this run."""
    values, reader = tensors_of(run.state), _reader(run, run.session.run_dir.checkpoint(manifest.step))
    is_saved = partial(_is_saved, reader.read_metadata().state_dict_metadata)
    states = values["optimizer"]["state"]
    # Parameters without a gradient so far have no saved state: they keep their new state.
    unused = {name: states.pop(name) for name in list(states) if not is_saved(f"optimizer.state.{name}", states[name])}
    _read(run, manifest, reader, values)
    states |= unused
    put_back(run.state, values)
    run.state.consumed = run.order.order.consumed(manifest.position)
    run.state.losses = LossWindow(manifest.unlogged_loss, manifest.unlogged_steps)


def _continue(run: Run, parent: Parent) -> None:
    """Load the state of another run's checkpoint. This run keeps its hyperparameters and any state the other lacks."""
    state, values = run.state, tensors_of(run.state)
    reader = _reader(run, prove_parent(run, parent))
    is_saved = partial(_is_saved, reader.read_metadata().state_dict_metadata)
    states = values["optimizer"]["state"] if parent.same_optimizer else {}
    averages = values.get("ema", {})
    wanted: Values = {
        "model": values["model"],
        "optimizer": {
            "state": {name: of for name, of in states.items() if is_saved(f"optimizer.state.{name}", of)},
        },
        "scheduler": {"0": {"last_epoch": 0}},
        "scaler": values["scaler"] if is_saved("scaler", values["scaler"]) else {},
        "ema": {name: average for name, average in averages.items() if is_saved("ema", {name: average})},
    }
    _read(run, parent.manifest, reader, wanted)
    states |= wanted["optimizer"]["state"]
    put_back(state, values | {name: wanted[name] for name in ("model", "scaler") if wanted[name]})
    for scheduler in state.schedulers:
        go_to(scheduler, wanted["scheduler"]["0"]["last_epoch"])
    if state.ema is not None:
        state.ema.begin(averages.keys() - wanted["ema"].keys())
    state.consumed = run.origin.consumed
    run.session.journal.event(
        "continued",
        job=parent.job,
        step=parent.manifest.step,
        consumed=run.origin.consumed,
        same_optimizer=parent.same_optimizer,
    )


def _reader(run: Run, folder: Path) -> CheckpointReader:
    return CheckpointReader(folder, patience=run.session.patience)


def _read(run: Run, manifest: Manifest, reader: CheckpointReader, values: Values) -> None:
    """Read values from a checkpoint in place, and load random generators and counters."""
    state, rank = run.state, run.mesh.rank
    seed_generators(run.spec.training.seed, step=manifest.step, rank=rank)
    # Generators belong to ranks: at another world size, they restart from (seed, step, rank).
    generators = {rng_key(rank): b""} if manifest.world == dist.get_world_size() else {}
    whole = values | generators
    try:
        load(whole, storage_reader=reader)
    except CheckpointException as error:  # a BaseException, which callers would not log
        raise RuntimeError(f"the checkpoint of step {manifest.step} verifies but does not load: {error}") from error
    for key in generators:
        set_rng_state(pickle.loads(whole[key]))
    values |= {name: whole[name] for name in values}
    state.step, state.tokens, state.skipped = manifest.step, manifest.tokens, manifest.skipped


def _is_saved(saved: Mapping[str, Any], place: str, values: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint contains any of these values."""
    return any(f"{place}.{name}" in saved for name in values)


def _check_same_data(run: Run, manifest: Manifest) -> None:
    if manifest.dataset != run.dataset.fingerprint:
        raise DataError(
            f"the checkpoint of step {manifest.step} was trained on dataset {manifest.dataset[:12]}, but this run "
            f"reads {run.dataset.fingerprint[:12]}, in which its position is meaningless; restore the files, or start "
            "a new run"
        )
