"""Resumption from the newest checkpoint that verifies, or start from another run's, at any world size."""

from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.checkpoint.access import RunAccess
from train_loop.checkpoint.base_weights import check_base, check_trained
from train_loop.checkpoint.files.metadata import parse_generators
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.optimizer_state import OptimizerState, fill_optimizer_state
from train_loop.checkpoint.parts import described, plain
from train_loop.checkpoint.select import agree_on_newest, prove_parent
from train_loop.checkpoint.state_dict import put_back, rng_key, tensors_of
from train_loop.data.order import Order
from train_loop.errors import DataError, UserError
from train_loop.optim import Plateau, go_to
from train_loop.run_dir import Manifest, Parent
from train_loop.state import LossWindow, TrainState, seed_generators, set_rng_state

Values = dict[str, Any]
_MEMBERS = "params"
"""Key of the parameters of an optimizer's group."""


class Origins(NamedTuple):
    """The states from which a run may start, the first that it has."""

    newest: Manifest | None = None
    """Its newest checkpoint that verifies, if that is known."""
    parent: Parent | None = None
    """Checkpoint of another run."""
    optimizer_state: OptimizerState | None = None
    """Optimizer state that belongs to the weights of the model's folder."""


AT_START = Origins()


def restore(state: TrainState, access: RunAccess, order: Order, *, seed: int, origins: Origins) -> None:
    """Load the state of a fresh run from a checkpoint, or leave it at its start. A collective call.

    The checkpoint is the newest of this run that verifies, or else that of the parent run. Newer checkpoints that do
    not verify are reported and skipped. Nothing is unpickled before its hash was checked.
    """
    manifest = origins.newest or agree_on_newest(access)
    if manifest is not None:
        _check_same_data(order, manifest)
        _resume(state, access, manifest, seed=seed)
        state.consumed = order.consumed(manifest.position)
    elif origins.parent is not None:
        _continue(state, access, origins.parent, seed=seed)
    elif origins.optimizer_state is not None:
        _start_from(state, access, origins.optimizer_state, seed=seed)
    else:
        seed_generators(seed, step=0, rank=dist.get_rank())


def _resume(state: TrainState, access: RunAccess, manifest: Manifest, *, seed: int) -> None:
    """Load the full state from a checkpoint of this run, without its position in the data."""
    check_base(state.base, manifest)
    _warn_of_torch(access, manifest)
    folder = access.run_dir.checkpoint(manifest.step)
    values, reader = tensors_of(state), CheckpointReader(folder, patience=access.patience)
    saved = reader.read_metadata().state_dict_metadata
    _check_trained(values, saved, manifest)
    is_saved = partial(_is_saved, saved)
    states, groups = values["optimizer"]["state"], [*values["optimizer"]["param_groups"]]
    # Parameters without a gradient so far have no saved state.
    unused = {name: states.pop(name) for name in list(states) if not is_saved(f"optimizer.state.{name}", states[name])}
    _read(state, manifest, reader, values, seed=seed)
    values["optimizer"]["state"] |= unused
    values["optimizer"]["param_groups"] = _regrouped(values["optimizer"]["param_groups"], groups, manifest)
    put_back(state, values)
    _forget_new(state, unused)
    state.losses = LossWindow(manifest.unlogged_loss, manifest.unlogged_steps)
    state.unlogged_line = dict(manifest.unlogged_line)


def _regrouped(saved: Iterable[Values], own: Iterable[Values], manifest: Manifest) -> list[Values]:
    """Return a checkpoint's settings of parameters for the groups that this run has.

    Raises UserError if parameters of one group have different settings: torch would take those of any of them.
    """
    settings = {
        name: {key: group[key] for key in group if key != _MEMBERS} for group in saved for name in group[_MEMBERS]
    }
    found = list[Values]()
    for group in own:
        first, *others = group[_MEMBERS]
        if moved := [name for name in others if settings[name] != settings[first]]:
            raise UserError(
                f"the checkpoint of step {manifest.step} has {first} and {moved[0]} in parameter groups with different "
                "settings, and this version of Trainshed trains both alike; clone the job, which then continues from "
                "that step with the groups of this version, or resume it with the earlier version"
            )
        found.append(settings[first] | {_MEMBERS: group[_MEMBERS]})
    return found


def _continue(state: TrainState, access: RunAccess, parent: Parent, *, seed: int) -> None:
    """Load the state of another run's checkpoint. This run keeps its hyperparameters and any state the other lacks."""
    check_base(state.base, parent.manifest)
    _warn_of_torch(access, parent.manifest)
    values = tensors_of(state)
    reader = CheckpointReader(prove_parent(access, parent), patience=access.patience)
    saved = reader.read_metadata().state_dict_metadata
    _check_trained(values, saved, parent.manifest)
    is_saved = partial(_is_saved, saved)
    states = values["optimizer"]["state"] if parent.same_optimizer else {}
    averages, trained = values.get("ema", {}), values.get("trained", {}) if parent.same_optimizer else {}
    wanted: Values = {
        "model": values["model"],
        "optimizer": {
            "state": {name: of for name, of in states.items() if is_saved(f"optimizer.state.{name}", of)},
        },
        "scheduler": _positions(state, parent),
        "scaler": values["scaler"] if is_saved("scaler", values["scaler"]) else {},
        "ema": {name: average for name, average in averages.items() if is_saved("ema", {name: average})},
        "trained": {name: weight for name, weight in trained.items() if is_saved("trained", {name: weight})},
    }
    _read(state, parent.manifest, reader, wanted, seed=seed)
    new = values["optimizer"]["state"].keys() - wanted["optimizer"]["state"].keys()
    states |= wanted["optimizer"]["state"]
    own = {name: wanted[name] for name in ("model", "scaler") if wanted[name]}
    put_back(state, values | own | {"trained": wanted["trained"]})
    _forget_new(state, new)
    for number, scheduler in enumerate(state.schedulers):
        if isinstance(scheduler, Plateau) and parent.same_plateau:
            scheduler.load_state_dict(scheduler.state_dict() | wanted["scheduler"][str(number)])
        else:
            go_to(scheduler, wanted["scheduler"]["0"]["last_epoch"])
    if state.ema is not None:
        state.ema.begin(averages.keys() - wanted["ema"].keys())
    access.journal.event(
        "continued",
        job=parent.job,
        step=parent.manifest.step,
        consumed=state.consumed,
        same_optimizer=parent.same_optimizer,
    )


def _positions(state: TrainState, parent: Parent) -> Values:
    """Return the state of schedules to read: their steps, and of those that evaluations move what these have set."""
    if not parent.same_plateau:
        return {"0": {"last_epoch": 0}}
    return {str(number): one.learned for number, one in enumerate(state.schedulers) if isinstance(one, Plateau)}


def _start_from(state: TrainState, access: RunAccess, found: OptimizerState, *, seed: int) -> None:
    """Load the optimizer state of a folder, whose weights the model has. This run keeps its hyperparameters."""
    facts, values = found.facts, tensors_of(state)
    fill_optimizer_state(found, values["optimizer"]["state"])
    put_back(state, values)
    for scheduler in state.schedulers:
        go_to(scheduler, facts.schedule)
    if facts.scaler and state.scaler.is_enabled():
        state.scaler.load_state_dict(facts.scaler)
    seed_generators(seed, step=facts.step, rank=dist.get_rank())
    state.step, state.tokens = facts.step, facts.tokens
    folder = str(found.folder)
    access.journal.event("optimizer_state_loaded", folder=folder, step=facts.step, consumed=state.consumed)


def _read(state: TrainState, manifest: Manifest, reader: CheckpointReader, values: Values, *, seed: int) -> None:
    """Read values from a checkpoint in place, and load random generators and counters."""
    rank = dist.get_rank()
    seed_generators(seed, step=manifest.step, rank=rank)
    # Generators belong to ranks: at another world size, they restart from (seed, step, rank).
    generators = {rng_key(rank): b""} if manifest.world == dist.get_world_size() else {}
    whole = described(values | generators)
    try:
        load(whole, storage_reader=reader)
    except CheckpointException as error:  # a BaseException, which callers would not log
        raise RuntimeError(f"the checkpoint of step {manifest.step} verifies but does not load: {error}") from error
    whole = plain(whole)
    for key in generators:
        set_rng_state(parse_generators(whole[key]))
    values |= {name: whole[name] for name in values}
    state.step, state.tokens, state.skipped = manifest.step, manifest.tokens, manifest.skipped


def _forget_new(state: TrainState, names: Iterable[str]) -> None:
    """Remove the optimizer states of parameters that a checkpoint lacks; their first gradient creates them."""
    parameters = dict(state.model.named_parameters(remove_duplicate=False))
    for name in names:
        for optimizer in state.optimizers:
            optimizer.state.pop(parameters[name], None)


def _warn_of_torch(access: RunAccess, manifest: Manifest) -> None:
    if (message := manifest.other_torch(version("torch"))) is not None:
        access.journal.warn(message)


def _check_trained(values: Values, saved: Mapping[str, Any], manifest: Manifest) -> None:
    names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    check_trained(values["model"], names, manifest)


def _is_saved(saved: Mapping[str, Any], place: str, values: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint contains any of these values."""
    return any(f"{place}.{name}" in saved for name in values)


def _check_same_data(order: Order, manifest: Manifest) -> None:
    if manifest.dataset != order.dataset:
        raise DataError(
            f"the checkpoint of step {manifest.step} was trained on dataset {manifest.dataset[:12]}, but this run "
            f"reads {order.dataset[:12]}, in which its position is meaningless; restore the files, or start "
            "a new run"
        )
