"""Choices of a plan for a run, with the fields of the event `model_built`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train_loop.plan.built.units import Float8Linears
from train_loop.plan.memory.forward import chunk_rows
from train_loop.plan.plan import Plan
from train_loop.spec import JobSpec


@dataclass(frozen=True)
class Choices:
    """Choices for a run, besides its mesh and units."""

    dtypes: Mapping[str, str]
    """dtype of weights between steps, of gradients' reduction, of computation, and of modules that differ from it."""
    attention: str | None
    """Implementation of attention; `auto` in a plan; None for own code."""
    loss_chunk_tokens: int | None
    """Tokens of a chunk of logits; None if they are computed at once."""
    checkpointing: str
    """Activation checkpointing, as a spec has it."""
    optimizer_groups: tuple[Mapping[str, Any], ...]
    cores: float
    """CPU cores of a rank."""
    backend: str
    """Backends of torch.distributed."""
    float8: Float8Linears | None
    """Linear modules that compute in float8; None without `strategy.float8`."""


def planned_choices(spec: JobSpec, plan: Plan) -> Choices:
    """Return the choices of a plan. The workers decide about `auto`, which depends on their packages."""
    on_gpu = bool(spec.scaling.resources_per_worker.get("GPU"))
    return Choices(
        dtypes=dtypes_of(spec, has_experts=plan.shape.active is not None),
        attention=None if spec.code is not None else spec.model.attn_implementation,
        loss_chunk_tokens=_chunk_tokens(spec, plan),
        checkpointing=str(spec.model.gradient_checkpointing),
        optimizer_groups=tuple(_groups(spec, plan)),
        cores=spec.scaling.resources_per_worker.get("CPU", 0.0),
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        float8=plan.shape.float8,
    )


def dtypes_of(spec: JobSpec, *, has_experts: bool) -> dict[str, str]:
    """Return the dtypes of a run: of weights, reduction and computation, and of modules that differ, by pattern."""
    model, strategy = spec.model, spec.strategy
    compute = strategy.param_dtype
    own: dict[str, str | None] = {
        "norms": strategy.norm_dtype,
        "routers": model.router_dtype if has_experts else None,
        "output": strategy.output_dtype,
        "frozen linear layers": model.quantize_base,
    }
    plain: dict[str, str] = {"weights": model.master_dtype, "reduction": strategy.reduce_dtype, "compute": compute}
    parts = {part: dtype for part, dtype in own.items() if dtype is not None and dtype != compute}
    return plain | parts | dict(strategy.precision)


def _chunk_tokens(spec: JobSpec, plan: Plan) -> int | None:
    if spec.code is not None or plan.shape.labels is not None:
        return None
    tokens = spec.sequences_per_device * spec.data.sequence_length // plan.mesh.sp
    return chunk_rows(spec, plan.shape.shared(tp=plan.mesh.tp), tokens=tokens)


def _groups(spec: JobSpec, plan: Plan) -> list[dict[str, Any]]:
    """Return the parameter groups; before a model has been built, one for each optimizer."""
    training, shape = spec.training, plan.shape
    if shape.counts is not None and shape.counts.groups:
        return [*shape.counts.groups]
    plain = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if training.optimizer != "muon":
        return [{"optimizer": training.optimizer, **plain, "parameters": shape.trained}]
    matrices = shape.trained_matrices
    parts = {"muon": matrices, "adamw": shape.trained - matrices}
    return [{"optimizer": name, **plain, "parameters": count} for name, count in parts.items() if count]
