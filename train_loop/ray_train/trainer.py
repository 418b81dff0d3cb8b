"""Preparation of samples and Ray Train's trainer, which runs the worker group of an attempt.

The import takes seconds. The driver runs it after its request for worker processes.
"""

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from train_loop.code.use import keep_code
from train_loop.data.dataset import Dataset
from train_loop.data.prepare.cache import evaluation_spec
from train_loop.data.prepare.pipeline import prepare
from train_loop.data.prepare.pointer import as_in_parent, pin, pinned_dataset
from train_loop.data.prepare.sources import check_sources
from train_loop.faults.failure import cause
from train_loop.plan import forgotten_gpu
from train_loop.ray_train.callbacks import GroupCallback
from train_loop.ray_train.inputs import read_inputs
from train_loop.ray_train.placement import autoscaled
from train_loop.ray_train.rank_setup import GroupConfig, work
from train_loop.run_dir import AttemptDir, RunDir
from train_loop.spec import JobSpec
from train_loop.system.input_files import current_policy
from train_loop.telemetry.event_log import EventLog

_LEFT_OUT = ("bad_rows", "long_rows", "dropped_rows", "untrained_rows")
"""Names of the counters of skipped, long, dropped and untrained rows."""


class Trainer(TorchTrainer):  # type: ignore[misc]
    """Ray Train's trainer without two helper processes that our runs do not need.

    The first distributes datasets; here the ranks open their own streams. The second removes the placement group of a
    killed controller; Ray removes it anyway after the driver's exit.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = (DatasetsCallback, PlacementGroupCleanerCallback)
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, unneeded)]


def prepare_samples(spec: JobSpec, run_dir: RunDir, journal: EventLog) -> None:
    """Prepare the run's samples for training and evaluation, or reuse those of its first attempt.

    Retries while storage is unavailable. Raises UserError, or StorageUnavailable after the timeout.
    """
    if ray.is_initialized() and (warning := forgotten_gpu(spec.scaling, ray.cluster_resources())):
        journal.warn(warning)
    away: list[str] = []

    def report_outage(paths: str, error: BaseException) -> None:
        away.append(paths or str(run_dir.root))
        journal.event("storage_unavailable", root=away[0], since=time.time(), error=str(error))

    # The first attempt keeps the code before it prepares samples; later ones find the run's copy.
    read_inputs(spec, partial(keep_code, spec, run_dir, journal.warn), on_first_failure=report_outage)
    # Ray wraps what its tasks raise.
    read_inputs(spec, partial(_prepare_samples, spec, run_dir, journal), cause=cause, on_first_failure=report_outage)
    if away:
        journal.event("storage_available", root=away[0])


def _prepare_samples(spec: JobSpec, run_dir: RunDir, journal: EventLog) -> None:
    dataset = _dataset(spec, run_dir, run_dir.data, journal)
    numbers = {
        "dataset": dataset.fingerprint,
        "samples": dataset.samples,
        "tokens": dataset.tokens,
        "utilisation": round(dataset.utilisation, 4),
        "rows": sum(part.rows for part in dataset.parts),
        **{name: sum(getattr(part, name) for part in dataset.parts) for name in _LEFT_OUT},
        "sources": [
            {
                "path": ", ".join(source.paths),
                "dataset": part.fingerprint,
                "rows": part.rows,
                **{name: getattr(part, name) for name in _LEFT_OUT},
                "on_long_rows": part.on_long_rows,
                "begins_with_bos": part.begins_with_bos,
                "samples": part.samples,
                "tokens": part.tokens,
                "utilisation": round(part.tokens / (part.samples * dataset.sample_tokens), 4),
            }
            for source, part in zip(spec.data.sources, dataset.parts, strict=True)
        ],
    }
    other = evaluation_spec(spec, dataset)
    if other is not None:
        evaluation = _dataset(other, run_dir, run_dir.eval_data, journal)
        numbers |= {"eval_dataset": evaluation.fingerprint, "eval_samples": evaluation.samples}
    journal.event("prepared", **numbers)


def _dataset(spec: JobSpec, run_dir: RunDir, pointer: Path, journal: EventLog) -> Dataset:
    dataset = pinned_dataset(spec, pointer)
    if dataset is None:
        check_sources(spec, current_policy())
        dataset = pin(as_in_parent(prepare(spec, run_dir.cache, journal.event), run_dir), pointer)
    return dataset


def trainer(
    spec: JobSpec, run_dir: RunDir, attempt: AttemptDir, environment: dict[str, Any], *, start: int = 1
) -> Trainer:
    """Return the trainer that runs the worker group and restarts it up to failure.max_failures times.

    `start` counts the trainers of the attempt: a group that moves to other hosts gets a new trainer.
    """
    resources = spec.scaling.resources_per_worker
    number = f"{attempt.number}" if start == 1 else f"{attempt.number}.{start}"
    return Trainer(
        work,
        train_loop_config={"run_dir": str(run_dir.root), "attempt": attempt.number},
        torch_config=GroupConfig(
            backend="cpu:gloo,cuda:nccl" if resources.get("GPU") else "gloo",
            timeout_s=math.ceil(spec.failure.hang_timeout_seconds),
        ),
        scaling_config=ScalingConfig(
            num_workers=spec.scaling.world,
            use_gpu=bool(resources.get("GPU")),
            resources_per_worker=resources,
            placement_strategy=spec.scaling.placement_strategy,
        ),
        run_config=RunConfig(
            # Unique per attempt: two drivers with the same name would share Ray Train's state.
            name=f"{spec.name} ({run_dir.root.name}-{number})",
            **_storage(),
            failure_config=FailureConfig(max_failures=spec.failure.max_failures),
            callbacks=[
                GroupCallback(run_dir, attempt.number, spec, autoscaled=autoscaled(os.environ)),
            ],
            worker_runtime_env=environment,
        ),
    )


def _storage() -> dict[str, Any]:
    """Return settings that keep Ray Train's own state in memory.

    An attempt needs none of it, because ranks report no checkpoints to Ray Train. On shared storage Ray Train's
    processes would recreate the run directory while that storage is not mounted.
    """
    return {"storage_path": "trainshed", "storage_filesystem": PyFileSystem(FSSpecHandler(MemoryFileSystem()))}
