"""Text output of plans, checkpoints, keys, the audit log and usage."""

from collections.abc import Iterable, Mapping

from service.api.schemas import Checkpoints, DeedOut, KeyOut, Me, PlanOut, UsageOut
from service.domain.access.roles import Role
from trainshed.cli.output.printing import show_facts, show_table, show_text


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
            "sequences per step": plan.global_batch_size,
            "tokens per step": plan.tokens_per_step,
            "steps": plan.steps,
            "parameters": f"{plan.parameters:,}",
            "memory per worker": f"{plan.memory.total_bytes / 2**20:,.0f} MiB",
            "a checkpoint": f"{plan.checkpoint_bytes / 2**20:,.0f} MiB",
            "on host, in addition": f"{plan.memory.host_bytes / 2**20:,.0f} MiB" if plan.memory.host_bytes else None,
        }
    )
    for warning in plan.warnings:
        show_text(f"warning: {warning}")


def show_checkpoints(checkpoints: Checkpoints) -> None:
    """Print checkpoints, one per row."""
    rows = (
        (
            str(c.step),
            f"{c.tokens:,}",
            f"{c.bytes / 2**20:,.1f} MiB",
            str(c.attempt),
            f"{c.time:%F %T}",
            "pinned" if c.pinned else "",
            " ".join(f"{name}={value:.4g}" for name, value in c.metrics.items()),
        )
        for c in checkpoints.data
    )
    show_table(("step", "tokens", "size", "attempt", "time", "", "metrics"), rows)


def show_keys(keys: Iterable[KeyOut]) -> None:
    """Print keys, one per row."""
    rows = (
        (
            key.id,
            key.name,
            f"{key.created_at:%F}",
            "revoked" if key.revoked_at else f"until {key.expires_at:%F %T}" if key.expires_at else "",
            _roles(key.roles) + (" and in other projects" if key.shared else ""),
        )
        for key in keys
    )
    show_table(("id", "name", "created", "", "roles"), rows)


def show_me(me: Me) -> None:
    """Print the key in use and its roles."""
    show_facts({"id": me.id, "name": me.name, "roles": _roles(me.roles)})


def show_audit(entries: Iterable[DeedOut]) -> None:
    """Print the audit log, one write per row."""
    rows = (
        (
            str(entry.number),
            f"{entry.time:%F %T}",
            entry.key_name,
            entry.action,
            entry.target,
            entry.project,
            _changes(entry),
        )
        for entry in entries
    )
    show_table(("number", "time", "who", "what", "to", "project", "changes"), rows)


def show_usage(days: Iterable[UsageOut]) -> None:
    """Print usage hours, one row per day and project."""
    hours = ((day, (day.worker_hours, day.cpu_hours, day.gpu_hours)) for day in days)
    rows = ((f"{day.day:%F}", day.project, *(f"{used:,.2f}" for used in parts)) for day, parts in hours)
    show_table(("day", "project", "worker hours", "CPU hours", "GPU hours"), rows)


def _roles(roles: Mapping[str, Role]) -> str:
    return " ".join(f"{project}={role}" for project, role in roles.items())


def _changes(entry: DeedOut) -> str:
    names = dict.fromkeys((*entry.before, *entry.after))
    return ", ".join(f"{name}: {entry.before.get(name)} → {entry.after.get(name)}" for name in names)


def _nodes(plan: PlanOut) -> str | None:
    return None if plan.nodes is None else "; ".join(_span(ranks) for ranks in plan.nodes)


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
