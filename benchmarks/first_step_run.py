"""The bare loop in a plain TorchTrainer, as a job of a cluster: `-m benchmarks.first_step_run FOLDER HERE`.

HERE/marks.jsonl gets a line when the driver is up, when the workers are ready, have built the model, and at every step.
"""

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.recover_run import mark, train
from benchmarks.workload import Workload


def main() -> None:
    """A TorchTrainer as its guide sets it up."""
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
