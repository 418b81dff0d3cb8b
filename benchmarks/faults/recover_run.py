"""The bare loop with checkpoints, which resumes from the newest one: under torchrun or in a plain Ray TorchTrainer.

`torchrun --max-restarts 1 -m benchmarks.faults.recover_run FOLDER HERE`, or `python -m benchmarks.faults.recover_run
FOLDER HERE ray`. HERE/marks.jsonl receives a line when Ray detects lost workers, when workers are ready, after they
have loaded a checkpoint, and at every step.
"""

import json
import logging
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.peers import bare
from benchmarks.workload import Workload

EVERY = 10
"""Steps between two saves."""


def main() -> None:
    """Train under torchrun, or with Ray."""
    folder, here = map(Path, sys.argv[1:3])
    if sys.argv[3:] == ["ray"]:
        under_ray(folder, here)
        return
    dist.init_process_group("gloo")
    train(folder, here)
    dist.destroy_process_group()


def under_ray(folder: Path, here: Path) -> None:
    """Run a TorchTrainer configured as in its guide, with one allowed failure."""
    workload = Workload.read(folder)
    ray.init(num_cpus=workload.world + 1, logging_level=logging.WARNING)
    TorchTrainer(
        lambda config: train(config["folder"], config["here"]),
        train_loop_config={"folder": folder, "here": here},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workload.world),
        run_config=RunConfig(
            name="benchmark",
            storage_path=str(here / "ray"),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[WorkerLossCallback(here)],
        ),
    ).fit()


class WorkerLossCallback(UserCallback):  # type: ignore[misc]
    """Callback that marks the time at which Ray's controller detects a failure."""

    def __init__(self, here: Path) -> None:
        self.here = here

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Write the mark; called by Ray Train's controller."""
        mark(self.here, "lost")


def train(folder: Path, here: Path, *, every: int = EVERY) -> None:
    """Train this rank's share from the newest checkpoint."""
    workload, rank = Workload.read(folder), dist.get_rank()
    mark(here, "ready", rank=rank, pid=os.getpid(), host=platform.node())
    built = bare.build(workload, folder)
    done = max((int(path.name) for path in here.glob("saved/*")), default=0)
    if done:
        values = values_of(built)
        load(values, checkpoint_id=here / "checkpoints" / str(done))
        set_state_dict(
            built.model, built.optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"]
        )
        built.scheduler.load_state_dict(values["scheduler"])
    mark(here, "loaded", rank=rank)
    for step, _ in enumerate(bare.steps(workload, folder, built, done=done), start=done + 1):
        if rank == 0:
            mark(here, "step", step=step)
        if step % every == 0:
            save(values_of(built), checkpoint_id=here / "checkpoints" / str(step))
            if rank == 0:
                (here / "saved").mkdir(exist_ok=True)
                (here / "saved" / str(step)).touch()


def values_of(built: bare.Bare) -> dict[str, Any]:
    """Return the contents of a checkpoint."""
    model, optimizer = get_state_dict(built.model, built.optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": built.scheduler.state_dict()}


def mark(here: Path, what: str, **fields: int | str) -> None:
    """Append a line with the current time."""
    with (here / "marks.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "time": time.time()} | fields) + "\n")


if __name__ == "__main__":
    main()
