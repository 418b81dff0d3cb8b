"""The bare loop around transformers' own parallelism: its plans of experts, layers and FSDP2."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import get_cosine_schedule_with_warmup
from transformers.distributed import DistributedConfig

from benchmarks.peers import bare
from benchmarks.training.trace import check_sharded
from benchmarks.workload import Workload


def steps(workload: Workload, folder: Path) -> Iterator[float]:
    """Train step by step; yield the loss of each over all ranks."""
    yield from bare.steps(workload, folder, build(workload, folder))


def build(workload: Workload, folder: Path) -> bare.Bare:
    """Build the model on the workload's mesh, its optimizer and its scheduler."""
    model = workload.first_model(folder).train()
    if "num_experts" in workload.config:
        model.set_experts_implementation("grouped_mm")
    wanted = DistributedConfig(fsdp_size=workload.data_ranks, **workload.strategy)
    config, _, mesh = model.prepare_distribute_model(wanted)
    model = model.maybe_distribute_model(model, config, mesh)
    if workload.data_ranks > 1:
        check_sharded(model)
    groups = by_mesh(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups], lr=workload.learning_rate, weight_decay=0.0, fused=True
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, 0, workload.steps)
    # As transformers' Trainer clips: torch's own function accepts the parameters of one mesh only.
    clip = bare.clip if len(groups) == 1 else functools.partial(clip_groups, groups)
    return bare.Bare(model, optimizer, scheduler, clip)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters of each mesh, and those of none."""
    found = defaultdict(list)
    for parameter in parameters:
        found[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return list(found.values())


def clip_groups(groups: Sequence[Sequence[nn.Parameter]], _: nn.Module, max_norm: float) -> None:
    """Clip gradients by the norm over all meshes."""
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
