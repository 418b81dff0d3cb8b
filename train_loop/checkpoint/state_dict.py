"""Contents of a checkpoint: tensors in DCP files, counters in the manifest."""

import hashlib
import math
import pickle
import time
from collections.abc import Mapping
from importlib.metadata import version
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from train_loop.data.order import Order
from train_loop.model.float8 import forget_scales
from train_loop.model.parts import memory_of
from train_loop.optim import averaged
from train_loop.plan import MeshPlan
from train_loop.run_dir import Fence, Manifest
from train_loop.spec import JobSpec, dump
from train_loop.state import TrainState, rng_state


def tensors_to_save(state: TrainState) -> dict[str, Any]:
    """Return all state of a run that has a value per rank or is too large for a manifest."""
    return tensors_of(state) | {rng_key(dist.get_rank()): pickle.dumps(rng_state())}


def tensors_of(state: TrainState) -> dict[str, Any]:
    """Return the state of model, optimizers, schedules, scaler and average, in its current sharding.

    Of a model with adapters it has the trained weights only. With a schedule-free optimizer, the model has the averaged
    weights, which exports and other jobs read, and `trained` those at which it trains.
    """
    fresh = not any(optimizer.state for optimizer in state.optimizers)
    # `get_state_dict`, because a fresh optimizer's own state_dict is empty: its moments would not be restored.
    model, optimizer = get_state_dict(state.model, state.optimizers)
    if state.base is not None:
        frozen = {n for n, p in state.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        model = {name: value for name, value in model.items() if name not in frozen}
    if fresh:
        # It has created the states by a step without gradients and learning rate. This leaves a step count and, by
        # weight decay, momentum. Every state begins at zero.
        for values in (v for member in state.optimizers for v in member.state.values()):
            for value in values.values():
                value.copy_(torch.zeros_like(value))
    schedulers = {str(i): scheduler.state_dict() for i, scheduler in enumerate(state.schedulers)}
    # A weight that is gathered in float8 is saved as a plain tensor of the master dtype, as without it.
    model = {name: memory_of(value) if isinstance(value, Tensor) else value for name, value in model.items()}
    average = {"ema": state.ema.averages} if state.ema is not None else {}
    scaler = state.scaler.state_dict()
    values = {"model": model, "optimizer": optimizer, "scheduler": schedulers, "scaler": scaler} | average
    averages = {id(parameter): weights for parameter, weights in averaged(state.optimizers)}
    if averages:
        # A tied parameter has several names.
        named = state.model.named_parameters(remove_duplicate=False)
        trained = {name: parameter for name, parameter in named if id(parameter) in averages and name in model}
        values["model"] = model | {name: averages[id(parameter)] for name, parameter in trained.items()}
        values["trained"] = {name: parameter.detach() for name, parameter in trained.items()}
    return values


def put_back(state: TrainState, values: dict[str, Any]) -> None:
    """Load the result of `tensors_of` into a state. Weights that are not in `trained` continue at their averages."""
    set_state_dict(
        state.model,
        state.optimizers,
        model_state_dict=values["model"] | values.get("trained", {}),
        optim_state_dict=values["optimizer"],
        options=StateDictOptions(strict=state.base is None),
    )
    for i, scheduler in enumerate(state.schedulers):
        scheduler.load_state_dict(values["scheduler"][str(i)])
    state.scaler.load_state_dict(values["scaler"])
    if state.ema is not None:
        state.ema.load(values["ema"])
    forget_scales(state.model.parameters())


def draft_manifest(
    state: TrainState, order: Order, measured: Mapping[str, float], *, spec: JobSpec, mesh: MeshPlan, token: Fence
) -> Manifest:
    """Return the manifest of a checkpoint taken now, before its files exist, with the metrics of its step."""
    return Manifest(
        step=state.step,
        tokens=state.tokens,
        skipped=state.skipped,
        unlogged_loss=state.losses.total,
        unlogged_steps=state.losses.steps,
        unlogged_line=state.unlogged_line,
        position=order.position(state.consumed),
        attempt=token.attempt,
        epoch=token.epoch,
        time=time.time(),
        fingerprint=hashlib.sha256(dump(spec).encode()).hexdigest(),
        dataset=order.dataset,
        world=mesh.world,
        mesh=mesh.axes,
        versions=_versions(spec),
        metrics={name: value for name, value in measured.items() if math.isfinite(value)},
        base=state.base,
        files={},
    )


def _versions(spec: JobSpec) -> dict[str, str]:
    """Return the versions of what computes a run, with the SHA-256 of the spec's own code."""
    own = {"code": spec.code.sha256} if spec.code is not None and spec.code.sha256 is not None else {}
    names = ("torch", "transformers", "numpy", *(("peft",) if spec.model.lora is not None else ()))
    libraries = {name: version(name) for name in names}
    return libraries | {"python": python_version()} | own


def rng_key(rank: int) -> str:
    """Return the key of a rank's random generators in a checkpoint."""
    return f"rng/rank-{rank:05d}"
