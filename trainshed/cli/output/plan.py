"""Text output of the plan of a spec."""

from service.api.schemas import PlanOut
from trainshed.cli.output.printing import show_facts, show_text


def show_plan(plan: PlanOut) -> None:
    """Print the plan of a spec."""
    mesh = ", ".join(f"{name} {size}" for name, size in zip(plan.mesh.names, plan.mesh.shape, strict=True))
    show_facts(
        {
            "name": plan.name,
            "workers": plan.world,
            "sizes": ", ".join(map(str, plan.sizes)) or None,
            "ranks by node": _nodes(plan),
            "mesh": f"{mesh}, ulysses {plan.mesh.sp}",
            "mesh of experts": f"efsdp {plan.mesh.efsdp}, ep {plan.mesh.ep}" if plan.mesh.ep > 1 else None,
            "reduction tree": _tree(plan),
            "sequences per step": plan.global_batch_size,
            "tokens per step": plan.tokens_per_step,
            "steps": plan.steps,
            "parameters": f"{plan.parameters:,}",
            "active parameters": None if plan.active_parameters is None else f"{plan.active_parameters:,}",
            "FLOPs per row": None if plan.flops_per_row is None else f"{plan.flops_per_row:,}",
            "memory per worker": f"{plan.memory.total_bytes / 2**20:,.0f} MiB",
            "documents begin with BOS": _bos(plan),
            "a checkpoint": f"{plan.checkpoint_bytes / 2**20:,.0f} MiB",
            "on host, in addition": f"{plan.memory.host_bytes / 2**20:,.0f} MiB" if plan.memory.host_bytes else None,
        }
    )
    for warning in plan.warnings:
        show_text(f"warning: {warning}")


def _bos(plan: PlanOut) -> str | None:
    """Return whether documents begin with BOS, for each source of text; None if there is none."""
    return ", ".join("yes" if source.begins_with_bos else "no" for source in plan.preview) or None


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
