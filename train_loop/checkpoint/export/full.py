"""Full state dict of a sharded model on rank 0, by two APIs; and of a checkpoint, as a file for `torch.load`.

`torchrun --nproc-per-node N -m train_loop.checkpoint.export.full RUN_DIR --step N --out FILE [--api dtensor|dcp]` runs
at any number of ranks that the model can be sharded over. Rank 0 needs memory for all weights of the model.
"""

import argparse
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.manifest import find_verified
from train_loop.errors import CheckpointError, UserError
from train_loop.model.folder import model_shape
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import build_mesh, local_device
from train_loop.plan import plan_job
from train_loop.run_dir import RunDir
from train_loop.spec import JobSpec, ScalingSpec
from train_loop.system.exit import leave


def by_dtensor(model: nn.Module) -> dict[str, Tensor]:
    """Gather DTensors one by one into rank 0's host memory; the other ranks get an empty dict. A collective call."""
    whole = dict[str, Tensor]()
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            whole[name] = full.detach().cpu()
    return whole


def by_dcp(model: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict by DCP's helper, also on rank 0. A collective call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict[str, Tensor](get_model_state_dict(model, options=options))  # type: ignore[arg-type]


WAYS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {"dtensor": by_dtensor, "dcp": by_dcp}


def main() -> None:
    """Load a checkpoint into a model that is sharded over these ranks, gather it and write it."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.checkpoint.export.full", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    parser.add_argument("--out", required=True, metavar="FILE", help="output file for torch.load")
    parser.add_argument("--api", choices=sorted(WAYS), default="dtensor")
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        model = load_model(RunDir.at(arguments.run_dir), arguments.step)
    except (UserError, CheckpointError) as error:
        sys.exit(str(error))
    whole = WAYS[arguments.api](model)
    if dist.get_rank() == 0:
        torch.save(whole, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


def load_model(run_dir: RunDir, step: int) -> nn.Module:
    """Return the model of a checkpoint, sharded over all ranks. Raises UserError, CheckpointError."""
    find_verified(run_dir, step)
    here = _at_this_size(run_dir.spec())
    plan = plan_job(here, model_shape(here.model))
    mesh = build_mesh(plan.mesh, local_device(int(os.environ.get("LOCAL_RANK", 0))), timeout=timedelta(minutes=30))
    model = build_sharded(here, mesh).model
    values = {"model": get_model_state_dict(model)}
    load(values, storage_reader=CheckpointReader(run_dir.checkpoint(step)))
    return model


def _at_this_size(spec: JobSpec) -> JobSpec:
    """Return the spec for one FSDP group over all ranks; its batch sizes are irrelevant here."""
    world = dist.get_world_size()
    return spec.model_copy(
        update={
            "scaling": ScalingSpec(num_workers=world),
            "strategy": spec.strategy.over_all_workers,
            "training": spec.training.model_copy(
                update={
                    "global_batch_size": world,
                    "per_device_train_batch_size": 1,
                    "gradient_accumulation_steps": None,
                    "reproducible": "same_size",
                    "reduction_tree": None,
                }
            ),
        }
    )


if __name__ == "__main__":
    main()
    leave()
