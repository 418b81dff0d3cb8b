"""Text output of the plan of a spec."""

import json

from service.api.schemas import MeshOut, PlanOut
from train_loop.plan import MeshPlan
from trainshed.cli.output.describe import float8_facts, show_groups
from trainshed.cli.output.outlook import show_outlook
from trainshed.cli.output.printing import show_facts, show_text


def show_plan(plan: PlanOut) -> None:
    """Print the plan of a spec."""
    show_facts(
        {
            "name": plan.name,
            "workers": plan.world,
            "sizes": ", ".join(map(str, plan.sizes)) or None,
            "ranks by node": _nodes(plan),
            **mesh_facts(plan.mesh),
            "reduction tree": _tree(plan),
            "sequences per step": plan.global_batch_size,
            "micro-batches": _micro_batches(plan),
            "tokens per step": plan.tokens_per_step,
            "steps": plan.steps,
            "ends by": plan.ends_by,
            "parameters": f"{plan.parameters:,}",
            "trained parameters": _trained(plan),
            "FSDP units": _units(plan),
            "dtypes": ", ".join(f"{part} {dtype}" for part, dtype in plan.choices.dtypes.items()),
            **float8_facts(plan.choices.float8 and plan.choices.float8.model_dump()),
            "attention": plan.choices.attention,
            "checkpointing": plan.choices.checkpointing,
            "loss": _loss(plan),
            "optimizer": _optimizers(plan),
            "backend": f"{plan.choices.backend}, {plan.choices.cores:g} CPU each",
            "active parameters": None if plan.active_parameters is None else f"{plan.active_parameters:,}",
            "FLOPs per row": None if plan.flops_per_row is None else f"{plan.flops_per_row:,}",
            "memory per worker": f"{plan.memory.total_bytes / 2**20:,.0f} MiB",
            "documents": _documents(plan),
            "a checkpoint": _mebibytes(plan.checkpoint_bytes),
            "on host, in addition": f"{plan.memory.host_bytes / 2**20:,.0f} MiB" if plan.memory.host_bytes else None,
        }
    )
    if any("name" in group for group in plan.choices.optimizer_groups):
        show_text("")
        show_groups(plan.choices.optimizer_groups)
        show_text("")
    for one in plan.spellings:
        became = ", ".join(f"{field}: {json.dumps(value)}" for field, value in one.became.items())
        show_text(f"read as: {one.field}: {json.dumps(one.written)} -> {became}")
    if plan.outlook is not None:
        show_outlook(plan, plan.outlook)
    for warning in plan.warnings:
        show_text(f"warning: {warning}")


def _optimizers(plan: PlanOut) -> str:
    """Return each optimizer with the number of its parameters."""
    counts = dict[str, int]()
    for group in plan.choices.optimizer_groups:
        name = str(group["optimizer"])
        counts[name] = counts.get(name, 0) + int(group["parameters"])
    return " and ".join(f"{name} ({count:,})" for name, count in counts.items())


def mesh_facts(mesh: MeshOut | MeshPlan) -> dict[str, str | None]:
    """Return the facts about a mesh in words."""
    axes = ", ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.shape, strict=True))
    experts = f"efsdp {mesh.efsdp}, ep {mesh.ep}" if mesh.ep > 1 else None
    return {"mesh": f"{axes}, ulysses {mesh.sp}", "mesh of experts": experts}


def _micro_batches(plan: PlanOut) -> str:
    """Return the micro-batches of a data-parallel rank in a step."""
    if plan.micro_batch_by == "workers":
        return "auto: the workers choose by their memory"
    chosen = ", which auto chooses by the memory of a worker" if plan.micro_batch_by == "memory" else ""
    return f"{plan.gradient_accumulation_steps} of {plan.micro_batch_size}{chosen}"


def _documents(plan: PlanOut) -> str | None:
    """Return whether documents begin with BOS, as the end of a sentence; None without sources of text."""
    texts = [source for source in plan.preview if source.begins_with_bos is not None]
    with_bos = [source.source for source in texts if source.begins_with_bos]
    if not texts:
        return None
    if not with_bos:
        return "begin without a BOS token"
    if len(with_bos) == len(texts):
        return "begin with the tokenizer's BOS token"
    return f"of {', '.join(with_bos)} begin with the tokenizer's BOS token, all others without one"


def _mebibytes(size: int) -> str:
    """Return a size in MiB, with a decimal below ten: checkpoints of adapters are small."""
    value = size / 2**20
    return f"{value:,.1f} MiB" if value < 10 else f"{value:,.0f} MiB"


def _trained(plan: PlanOut) -> str | None:
    """Return the trained parameters and their share; None if all are trained."""
    if plan.trained_parameters >= plan.parameters:
        return None
    return f"{plan.trained_parameters:,}, {plan.trained_parameters / plan.parameters:.2%}"


def _units(plan: PlanOut) -> str | None:
    """Return the FSDP units, the outermost first; None if they are unknown."""
    units = plan.choices.units
    if units is None:
        return None
    found = ", ".join(f"{one.count} x {one.module} of {one.parameters:,}" for one in units)
    return found or "none: each worker holds the whole model"


def _loss(plan: PlanOut) -> str | None:
    """Return the chunks in which logits are computed; None if they are computed at once."""
    tokens = plan.choices.loss_chunk_tokens
    return None if tokens is None else f"in chunks of {tokens} tokens"


def _tree(plan: PlanOut) -> str | None:
    tree = plan.reduction_tree
    if tree is None:
        return None
    sizes = ", ".join(map(str, tree.allowed_workers))
    return (
        f"{tree.micro_batches} micro-batches, up to {tree.max_shards} shards x {tree.max_replicas} replicas; same bits "
        f"with {sizes} workers"
    )


def _nodes(plan: PlanOut) -> str | None:
    return None if plan.nodes is None else "; ".join(_span(ranks) for ranks in plan.nodes)


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
