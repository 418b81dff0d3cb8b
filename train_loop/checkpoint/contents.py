"""What a checkpoint of a run holds: tensors in DCP files, counters in the manifest."""

import hashlib
import pickle
import time
from importlib.metadata import version
from platform import python_version
from typing import Any

from train_loop.assemble import Run
from train_loop.run_dir import Manifest
from train_loop.spec import dump
from train_loop.state import rng_state


def tensors_to_save(run: Run) -> dict[str, Any]:
    """Everything of a run that has a value per rank or is too big for a manifest."""
    return run.state.state_dict() | {rng_key(run.mesh.rank): pickle.dumps(rng_state())}


def draft_manifest(run: Run) -> Manifest:
    """The manifest of a checkpoint taken now, before its files exist."""
    return Manifest(
        step=run.state.step,
        tokens=run.state.tokens,
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
