"""Inference from the checkpoint of a job: its weights, and the tokens that end its answers, as its export has them."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from train_loop.checkpoint.access import RunAccess
from train_loop.checkpoint.base_weights import check_base
from train_loop.checkpoint.export.text_files import write_run_configs
from train_loop.checkpoint.weights import load_weights
from train_loop.errors import UserError
from train_loop.parallel.build import ShardedModel
from train_loop.run_dir import Parent, RunDir, storage_failed
from train_loop.spec import InferJobSpec
from train_loop.system.retry import patiently


def load_weights_of_job(spec: InferJobSpec, sharded: ShardedModel, access: RunAccess) -> InferJobSpec:
    """Read the weights of `model.job` into a sharded model, or those of its adapters. A collective call.

    Returns the spec with the tokens that end answers, unless it names them. Raises UserError, CheckpointError.
    """
    parent = patiently(access.run_dir.parent, seconds=access.patience, may_pass=storage_failed)
    if parent is None:
        raise UserError(
            f"model.job={spec.model.job} needs the service, which finds the checkpoint; give model.path the folder "
            "that `trainshed export` prints"
        )
    check_base(sharded.base, parent.manifest)
    load_weights(sharded.anatomy, access, parent, spec.model.weights)
    if spec.infer.output != "generate" or spec.infer.generation.stop_tokens is not None:
        return spec
    found = [stop_tokens_of_job(parent) if dist.get_rank() == 0 else ()]
    dist.broadcast_object_list(found, src=0)
    # Without any, the tokenizer of the rows decides, as for a folder.
    generation = spec.infer.generation.model_copy(update={"stop_tokens": found[0] or None})
    return spec.model_copy(update={"infer": spec.infer.model_copy(update={"generation": generation})})


def stop_tokens_of_job(parent: Parent) -> tuple[int, ...]:
    """Return the tokens that end answers by the generation_config.json of the job's export; empty without any."""
    run_dir = RunDir.at(parent.run_dir)
    run = run_dir.spec().run
    with TemporaryDirectory() as folder:
        write_run_configs(run, run_dir, Path(folder), dtype=run.model.dtype)
        found: Any = json.loads(Path(folder, "generation_config.json").read_bytes()).get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
