"""Full state dict of a sharded model on rank 0, by two APIs; and of a checkpoint, as a file for `torch.load`.

`torchrun --nproc-per-node N -m train_loop.checkpoint.export.full RUN_DIR --step N --out FILE [--with optimizer]` runs
at any number of ranks that the model can be sharded over. Rank 0 needs memory for all tensors that it writes.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from train_loop.checkpoint.export.optimizer import training_state
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.manifest import find_verified
from train_loop.checkpoint.optimizer_state import TrainingState
from train_loop.checkpoint.state_dict import put_back, tensors_of
from train_loop.errors import CheckpointError, UserError
from train_loop.model.folder import model_shape
from train_loop.optim import build_optimizers
from train_loop.parallel.build import ShardedModel, build_sharded
from train_loop.parallel.mesh import build_mesh, local_device
from train_loop.plan import plan_job
from train_loop.run_dir import Manifest, RunDir
from train_loop.spec import SCHEDULE_FREE, JobSpec, ScalingSpec
from train_loop.state import TrainState
from train_loop.system.exit import leave

States = dict[str, dict[str, Tensor]]
"""Tensors of optimizers by parameter, then by the name of the state."""
_WITHOUT_FILE = {
    "adamw_8bit": "are not plain tensors",
    SCHEDULE_FREE: "belong to other weights than those of the model, which are averages",
}
"""Optimizers whose states a file does not have, with the reason."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def by_dtensor(model: nn.Module) -> dict[str, Tensor]:
    """Gather DTensors one by one into rank 0's host memory; the other ranks get an empty dict. A collective call."""
    return _gather(model.state_dict())


def by_dcp(model: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict by DCP's helper, also on rank 0. A collective call."""
    return dict[str, Tensor](get_model_state_dict(model, options=_WHOLE))  # type: ignore[arg-type]


def states_by_dtensor(state: TrainState) -> States:
    """Gather the optimizer state like `by_dtensor`. A collective call."""
    found = {name: _gather(values) for name, values in tensors_of(state)["optimizer"]["state"].items()}
    return found if dist.get_rank() == 0 else {}


def states_by_dcp(state: TrainState) -> States:
    """Gather the optimizer state like `by_dcp`. A collective call."""
    _, optimizer = get_state_dict(state.model, state.optimizers, options=_WHOLE)
    found: States = optimizer.get("state", {})  # type: ignore[assignment]
    return found


def _gather(values: Mapping[str, Any]) -> dict[str, Tensor]:
    whole = dict[str, Tensor]()
    for name, value in values.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            whole[name] = full.detach().cpu()
    return whole


WAYS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {"dtensor": by_dtensor, "dcp": by_dcp}
STATE_WAYS: dict[str, Callable[[TrainState], States]] = {"dtensor": states_by_dtensor, "dcp": states_by_dcp}


def main() -> None:
    """Load a checkpoint into a model that is sharded over these ranks, gather it and write it."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.checkpoint.export.full", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    parser.add_argument("--out", required=True, metavar="FILE", help="output file for torch.load")
    parser.add_argument("--api", choices=sorted(WAYS), default="dtensor")
    parser.add_argument("--with", choices=["optimizer"], dest="extra", help="what to write besides the model")
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        whole = gather(
            RunDir.at(arguments.run_dir), arguments.step, arguments.api, optimizer=arguments.extra is not None
        )
    except (UserError, CheckpointError) as error:
        sys.exit(str(error))
    if dist.get_rank() == 0:
        torch.save(whole, arguments.out)
        config = f"--config {arguments.run_dir}"
        sys.stderr.write(f"start from it: trainshed weights convert {arguments.out} FOLDER {config}\n")
    dist.barrier()
    dist.destroy_process_group()


def gather(run_dir: RunDir, step: int, api: str, *, optimizer: bool) -> dict[str, Any]:
    """Return the content of the file on rank 0: the model alone, or with the optimizer state. A collective call.

    Raises UserError, CheckpointError.
    """
    if not optimizer:
        return dict(WAYS[api](load_model(run_dir, step)))
    state, facts = load_state(run_dir, step)
    return {"model": WAYS[api](state.model), "optimizer": STATE_WAYS[api](state), "training": facts.model_dump()}


def load_model(run_dir: RunDir, step: int) -> nn.Module:
    """Return the model of a checkpoint, sharded over all ranks. Raises UserError, CheckpointError."""
    model = _open(run_dir, step).sharded.model
    values = {"model": get_model_state_dict(model)}
    load(values, storage_reader=CheckpointReader(run_dir.checkpoint(step)))
    return model


def load_state(run_dir: RunDir, step: int) -> tuple[TrainState, TrainingState]:
    """Return model and optimizers of a checkpoint, sharded over all ranks, and the rest that a run continues with.

    Raises UserError, CheckpointError.
    """
    spec, manifest, sharded = _open(run_dir, step)
    if (why := _WITHOUT_FILE.get(spec.training.optimizer)) is not None:
        raise UserError(
            f"the states of {spec.training.optimizer} {why}; write the model alone, without --with optimizer"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = GradScaler(device, enabled=spec.model.dtype == "fp16")
    state = TrainState(sharded.model, build_optimizers(sharded.anatomy, spec.training), (), scaler)
    reader, values = CheckpointReader(run_dir.checkpoint(step)), tensors_of(state)
    saved, states = reader.read_metadata().state_dict_metadata, values["optimizer"]["state"]
    # Parameters without a gradient so far have no saved state: theirs is that of a new optimizer, as on resume.
    unused = {
        name: states.pop(name)
        for name, of in list(states.items())
        if not any(f"optimizer.state.{name}.{key}" in saved for key in of)
    }
    wanted = {"model": values["model"], "optimizer": {"state": states}, "scaler": values["scaler"]}
    wanted["scheduler"] = {"0": {"last_epoch": 0}}
    load(wanted, storage_reader=reader)
    values["optimizer"]["state"] = wanted["optimizer"]["state"] | unused
    put_back(state, values)
    return state, training_state(spec, manifest, wanted)


class _Opened(NamedTuple):
    spec: JobSpec
    manifest: Manifest
    sharded: ShardedModel


def _open(run_dir: RunDir, step: int) -> _Opened:
    """Return a verified checkpoint, and its model without weights."""
    manifest = find_verified(run_dir, step)
    if run_dir.spec().run.model.lora is not None:
        raise UserError(
            "the run trains adapters (model.lora), whose checkpoints have no other weights; export with form merged, "
            "or dequantized for a quantised base"
        )
    here = _at_this_size(run_dir.spec().run)
    plan = plan_job(here, model_shape(here.model))
    mesh = build_mesh(plan.mesh, local_device(int(os.environ.get("LOCAL_RANK", 0))), timeout=timedelta(minutes=30))
    return _Opened(here, manifest, build_sharded(here, mesh, needs_weights=False))


def _at_this_size(spec: JobSpec) -> JobSpec:
    """Return the spec for one FSDP group over all ranks; its batch sizes and float8 are irrelevant here."""
    world = dist.get_world_size()
    return spec.model_copy(
        update={
            "scaling": ScalingSpec(num_workers=world),
            "strategy": spec.strategy.over_all_workers.model_copy(update={"float8": None}),
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
