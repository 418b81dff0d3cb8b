"""The event `model_built`: all choices for a run, from the built model."""

from typing import Any

import torch
import torch.distributed as dist

from train_loop.loop.build import Run
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.objectives.routed import RoutedLoss
from train_loop.loop.objectives.token_cross_entropy import TokenLoss
from train_loop.model.quantize import count_values
from train_loop.optim import describe_groups
from train_loop.parallel.unit_tree import unit_tree
from train_loop.plan import dtypes_of


def record_built(run: Run, workers: list[dict[str, Any]]) -> None:
    """Write `model_built` with the units of the model and all choices for it."""
    found, anatomy = unit_tree(run.state.model), run.objective.anatomy
    run.session.journal.event(
        "model_built",
        units=[vars(group) for group in found.units],
        mesh=run.mesh.plan.axes,
        hosts=_ranks_by_host(workers),
        dtypes=dtypes_of(run.spec, has_experts=anatomy.experts is not None),
        attention=anatomy.family.attention_kernel(anatomy.model),
        loss_chunk_tokens=_chunk_tokens(run.objective),
        checkpointing=str(run.spec.model.gradient_checkpointing),
        parameters=count_values(run.state.model),
        trained_parameters=sum(p.numel() for p in run.state.model.parameters() if p.requires_grad),
        optimizer_groups=describe_groups(run.state.optimizers),
        cores=torch.get_num_threads(),
        backend=dist.get_backend() if run.mesh.device.type == "cpu" else dist.get_backend_config(),
        float8=_float8(run),
        tree=found.tree,
    )


def _ranks_by_host(workers: list[dict[str, Any]]) -> dict[str, list[int]]:
    hosts = dict[str, list[int]]()
    for worker in workers:
        hosts.setdefault(worker["host"], []).append(worker["rank"])
    return hosts


def _chunk_tokens(objective: Objective) -> int | None:
    inner = objective.inner if isinstance(objective, RoutedLoss) else objective
    return inner.chunk_rows if isinstance(inner, TokenLoss) else None


def _float8(run: Run) -> dict[str, Any] | None:
    if (found := run.float8) is None:
        return None
    emulated = run.mesh.device.type != "cuda"
    return {
        "scaling": found.scaling,
        "linears": len(found.names),
        "left_out": [*found.left_out],
        "emulated": emulated,
    }
