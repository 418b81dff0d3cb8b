"""The event `model_built`: all choices for a run, from the built model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from train_loop.loop.build import Run
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.objectives.routed import RoutedLoss
from train_loop.loop.objectives.token_cross_entropy import TokenLoss
from train_loop.loop.session import Session
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.quantize import count_values
from train_loop.optim import describe_groups
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.unit_tree import unit_tree
from train_loop.plan import dtypes_of
from train_loop.spec import JobSpec


def record_built(run: Run, workers: list[dict[str, Any]]) -> None:
    """Write `model_built` with the units of the model and all choices for the run."""
    record_model(
        run.session,
        run.spec,
        run.mesh,
        run.objective.anatomy,
        workers,
        loss_chunk_tokens=_chunk_tokens(run.objective),
        optimizer_groups=describe_groups(run.state.optimizers),
        float8=_float8(run),
    )


def record_model(
    session: Session,
    spec: JobSpec,
    mesh: Mesh,
    anatomy: Anatomy,
    workers: list[dict[str, Any]],
    *,
    loss_chunk_tokens: int | None = None,
    optimizer_groups: Sequence[Mapping[str, Any]] = (),
    float8: Mapping[str, Any] | None = None,
) -> None:
    """Write `model_built` of a job of any kind: the units of its model, and the choices for it."""
    found, model = unit_tree(anatomy.model), anatomy.model
    session.journal.event(
        "model_built",
        units=[vars(group) for group in found.units],
        mesh=mesh.plan.axes,
        hosts=_ranks_by_host(workers),
        dtypes=dtypes_of(spec, has_experts=anatomy.experts is not None),
        attention=anatomy.family.attention_kernel(model),
        loss_chunk_tokens=loss_chunk_tokens,
        checkpointing=str(spec.model.gradient_checkpointing),
        parameters=count_values(model),
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad and spec.infer is None),
        optimizer_groups=[*optimizer_groups],
        cores=torch.get_num_threads(),
        backend=dist.get_backend() if mesh.device.type == "cpu" else dist.get_backend_config(),
        float8=float8,
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
