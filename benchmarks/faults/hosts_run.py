"""The bare loop with checkpoints in a plain Ray TorchTrainer, on the running cluster at RAY_ADDRESS.

`python -m benchmarks.faults.hosts_run FOLDER HERE`. Both folders are on storage that all hosts share.
"""

import logging
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.faults.recover_run import WorkerLossCallback, train
from benchmarks.workload import Workload

WORKER = {"CPU": 0.75}
"""Resources of a worker: two fit on a host with two CPUs."""
EVERY = 20
"""Steps between two saves."""


def main() -> None:
    """Run the trainer with Ray's defaults and unlimited restarts."""
    folder, here = map(Path, sys.argv[1:3])
    workload = Workload.read(folder)
    ray.init(logging_level=logging.WARNING)
    TorchTrainer(
        lambda config: train(config["folder"], config["here"], every=EVERY),
        train_loop_config={"folder": folder, "here": here},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workload.world, resources_per_worker=WORKER),
        run_config=RunConfig(
            name="benchmark",
            storage_path=str(here / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[WorkerLossCallback(here)],
        ),
    ).fit()


if __name__ == "__main__":
    main()
