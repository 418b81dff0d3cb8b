"""Checkpoints of an untrained model, for exports."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.builders.specs import TINY, spec
from train_loop.checkpoint.save import Saver
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import local_stream
from train_loop.loop.build import Run, build_run
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir
from train_loop.telemetry.timers import StepTimer
from train_loop.train import save


def save_a_run(folder: Path, run_dir: RunDir, config: dict[str, object]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save a checkpoint of step 3 of an untrained model; return its weights and averages, by name."""
    return save_a_run_of(folder, run_dir, {"config": TINY | config, "dtype": "fp32"})


def save_a_run_of(
    folder: Path, run_dir: RunDir, model: dict[str, object]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save such a checkpoint of a spec's model."""
    job = spec(
        model=model,
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"ema_decay": 0.5, "optimizer": "sgd"},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream)
    dataset = find_dataset(job, folder)
    if session.rank == 0:
        run_dir.write_spec(job)
        pin(dataset, run_dir.data)
    run = build_run(job, session, dataset)
    assert run.state.ema is not None
    with torch.no_grad():
        for average in run.state.ema.averages.values():
            average.mul_(0.5)
    run.state.step = 3
    saver = Saver(session.access, job.checkpoint, "sync")
    save(run, saver, {}, StepTimer())
    saver.close()
    return _weights_of(run), {name: _whole(average) for name, average in run.state.ema.averages.items()}


def _weights_of(run: Run) -> dict[str, Tensor]:
    return {name: _whole(weight).clone() for name, weight in run.state.model.state_dict().items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
