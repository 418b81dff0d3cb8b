"""Inference jobs on existing ranks, without a service, and the models and rows that they read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.datasets import prepare_tokens
from tests.support.builders.specs import infer_spec
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.read_results import read_rows
from train_loop.data.stream.local import local_stream
from train_loop.infer import infer
from train_loop.loop.session import Session
from train_loop.run_dir import Outcome, RunDir
from train_loop.spec import InferJobSpec, parse_any


def save_model(folder: Path, config: dict[str, Any], *, scale: float = 3.0) -> Path:
    """Write a model with random weights, whose logits are far enough apart that rounding changes no token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return folder


def infer_rows(
    raw: dict[str, Any], folder: Path, *, stop_after: int | None = None
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Compute the results of a spec on the existing ranks; return how the job ended, and the committed rows.

    Rank 0 prepares rows that need it.

    `stop_after` is the number of looks for a stop request after which the job is paused.
    """
    job = parse_any(infer_spec() | raw | {"scaling": {"num_workers": dist.get_world_size()}})
    assert isinstance(job, InferJobSpec)
    if dist.get_rank() == 0:
        prepare_tokens(job.run, folder)
    dist.barrier()
    calls = iter(range(10**6))
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)
    stops = replace(
        session, stop_requested=lambda: stop_after is not None and next(calls) >= stop_after, end_event="work_ended"
    )
    outcome = infer(job, stops, find_dataset(job.run, folder))
    return outcome, list(read_rows(RunDir(folder)))
