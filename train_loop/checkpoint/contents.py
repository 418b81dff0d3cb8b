"""What a checkpoint of a run holds: tensors in DCP files, counters in the manifest."""

import hashlib
import pickle
import time
from importlib.metadata import version
from platform import python_version
from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from train_loop.assemble import Run
from train_loop.run_dir import Manifest
from train_loop.spec import dump
from train_loop.state import TrainState, rng_state


def tensors_to_save(run: Run) -> dict[str, Any]:
    """Everything of a run that has a value per rank or is too big for a manifest."""
    return tensors_of(run.state) | {rng_key(run.mesh.rank): pickle.dumps(rng_state())}


def tensors_of(state: TrainState) -> dict[str, Any]:
    """Model, optimizer and schedule, sharded as they are."""
    # The helper, because a fresh optimizer's own state_dict is empty and would restore no moments.
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": state.scheduler.state_dict()}


def put_back(state: TrainState, values: dict[str, Any]) -> None:
    """The inverse of `tensors_of`."""
    set_state_dict(state.model, state.optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])
    state.scheduler.load_state_dict(values["scheduler"])


def draft_manifest(run: Run) -> Manifest:
    """The manifest of a checkpoint taken now, before its files exist."""
    return Manifest(
        step=run.state.step,
        tokens=run.state.tokens,
        skipped=run.state.skipped,
        position=run.order.order.position(run.state.consumed),
        attempt=run.session.attempt,
        time=time.time(),
        fingerprint=hashlib.sha256(dump(run.spec).encode()).hexdigest(),
        dataset=run.dataset.fingerprint,
        world=run.session.world,
        mesh=run.mesh.plan.axes,
        versions={name: version(name) for name in ("torch", "transformers", "numpy")} | {"python": python_version()},
        files={},
    )


def rng_key(rank: int) -> str:
    """Where the generators of a rank are kept."""
    return f"rng/rank-{rank:05d}"
