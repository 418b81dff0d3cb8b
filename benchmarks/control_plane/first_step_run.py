"""The bare loop in a plain TorchTrainer, as a Ray job: `-m benchmarks.control_plane.first_step_run FOLDER HERE`.

HERE/marks.jsonl receives a line when the driver runs, when workers are ready, after the model's build, and per step.
"""

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.faults.recover_run import mark, train
from benchmarks.workload import Workload


def main() -> None:
    """Run a TorchTrainer configured as in its guide."""
    folder, here = map(Path, sys.argv[1:])
    mark(here, "driver")
    workload = Workload.read(folder)
    ray.init(address="auto")
    TorchTrainer(
        lambda config: train(config["folder"], config["here"]),
        train_loop_config={"folder": folder, "here": here},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workload.world, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name=here.name, storage_path=str(here / "ray")),
    ).fit()


if __name__ == "__main__":
    main()
