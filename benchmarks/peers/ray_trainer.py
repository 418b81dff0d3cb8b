"""The bare loop in a plain Ray TorchTrainer on a new local Ray: `-m benchmarks.peers.ray_trainer FOLDER OUT`."""

import logging
import sys
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.peers import bare
from benchmarks.workload import Workload


def main() -> None:
    """Run the trainer on two workers."""
    folder, out = map(Path, sys.argv[1:])
    workload = Workload.read(folder)
    ray.init(num_cpus=workload.world + 1, logging_level=logging.WARNING)
    TorchTrainer(
        _work,
        train_loop_config={"folder": folder, "out": out},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workload.world),
        run_config=RunConfig(name="benchmark", storage_path=str(folder / "ray")),
    ).fit()


def _work(config: dict[str, Any]) -> None:
    trace = bare.train(Workload.read(config["folder"]), config["folder"])
    if dist.get_rank() == 0:
        trace.write(config["out"])


if __name__ == "__main__":
    main()
