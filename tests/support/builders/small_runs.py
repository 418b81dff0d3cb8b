"""Small runs of the whole loop on the existing ranks, and their metrics and events."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from train_loop import train
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.faults.failure import report_failure
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import JobSpec

STEPS, BATCH, LENGTH = 6, 4, 32


def job_of(rows: Path, world: int, **parts: dict[str, Any]) -> JobSpec:
    """Return the spec of a small run, with some fields overridden."""
    base: dict[str, dict[str, Any]] = {
        "model": {"config": TINY, "dtype": "fp32", "gradient_checkpointing": "none"},
        "data": {"train": {"path": str(rows)}, "columns": {"input_ids": "ids"}, "packing": False, "shuffle": False},
        "training": {"max_steps": STEPS, "global_batch_size": BATCH, "audit_samples": True, "weight_decay": 0.1}
        # A schedule that depends only on completed steps.
        | {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
        "checkpoint": {"every_steps": 3},
        "scaling": {"num_workers": world},
    }
    return spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base | parts})


def run(
    rows: Path,
    folder: Path,
    *,
    place: dict[str, Any] | None = None,
    model: Any = None,
    data: Any = None,
    strategy: Any = None,
    checkpoint: Any = None,
    **training: Any,
) -> None:
    """Run the loop in a folder, with fields of its spec and of its session overridden."""
    parts = {
        "model": model or {},
        "data": data or {},
        "strategy": strategy or {},
        "checkpoint": checkpoint or {},
        "training": training,
    }
    job = job_of(rows, dist.get_world_size(), **parts)
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)
    session = replace(session, **(place or {}))
    with report_failure(session):
        train.train(job, session, find_dataset(job, folder))


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of a run."""
    return list(read_lines(RunDir(folder).attempt(1).metrics))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a kind."""
    return [line for line in read_lines(RunDir(folder).attempt(1).events) if line["event"] == name]


def numbers(line: dict[str, Any]) -> list[Any]:
    """Return the values that must be equal in two runs of the same training."""
    return [line[name] for name in ("loss", "grad_norm", "lr")]
