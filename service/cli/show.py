"""How answers look in a terminal."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from pydantic import BaseModel, JsonValue
from rich.console import Console

from service.api.access_schemas import DeedOut, KeyOut, Me
from service.api.ledger_schemas import Checkpoints
from service.api.plan_schemas import PlanOut
from service.api.schemas import JobOut
from service.domain.access import Role

_console = Console(highlight=False, soft_wrap=True)
_notes = Console(highlight=False, soft_wrap=True, stderr=True)


def show_json(answer: BaseModel) -> None:
    """The answer as the service gave it, for programs."""
    print(answer.model_dump_json(indent=2))


def show_job(job: JobOut) -> None:
    """One job, a fact per line."""
    facts: dict[str, object] = {
        "id": job.id,
        "name": job.name,
        "project": job.project,
        "state": job.state,
        "reason": job.reason.message if job.reason else None,
        "what helps": job.reason.remedy if job.reason else None,
        "goes on from": f"step {job.parent.step} of {job.parent.job}" if job.parent else None,
        "progress": _progress(job),
        "attempt": job.attempt,
        "restarts": job.restarts,
        "steps trained again": job.lost_work.steps,
        "GPU hours": job.gpu_hours,
        "run directory": job.run_dir,
        "dashboard": job.dashboard_url,
    }
    _facts(facts)


def show_jobs(jobs: Iterable[JobOut]) -> None:
    """Jobs, one per row."""
    rows = (
        (job.id, job.name, job.state.value, _progress(job) or "", job.reason.message if job.reason else "")
        for job in jobs
    )
    _table(("id", "name", "state", "progress", "reason"), rows)


def show_plan(plan: PlanOut) -> None:
    """What a spec comes to."""
    mesh = ", ".join(f"{name} {size}" for name, size in zip(plan.mesh.names, plan.mesh.shape, strict=True))
    _facts(
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
            "beside it, on host": f"{plan.memory.host_bytes / 2**20:,.0f} MiB" if plan.memory.host_bytes else None,
        }
    )
    for warning in plan.warnings:
        _console.print(f"warning: {warning}", markup=False)


def show_checkpoints(checkpoints: Checkpoints) -> None:
    """The ledger, one checkpoint per row."""
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
    _table(("step", "tokens", "size", "attempt", "time", "", "metrics"), rows)


def show_keys(keys: Iterable[KeyOut]) -> None:
    """Keys, one per row."""
    rows = (
        (
            key.id,
            key.name,
            f"{key.created_at:%F}",
            "revoked" if key.revoked_at else f"until {key.expires_at:%F %T}" if key.expires_at else "",
            _roles(key.roles),
        )
        for key in keys
    )
    _table(("id", "name", "created", "", "roles"), rows)


def show_me(me: Me) -> None:
    """Whose key is in use."""
    _facts({"id": me.id, "name": me.name, "roles": _roles(me.roles)})


def show_deeds(deeds: Iterable[DeedOut]) -> None:
    """The audit log, one write per row."""
    rows = (
        (str(deed.number), f"{deed.time:%F %T}", deed.key_name, deed.action, deed.target, deed.project, _changes(deed))
        for deed in deeds
    )
    _table(("number", "time", "who", "what", "to", "project", "changes"), rows)


def _roles(roles: Mapping[str, Role]) -> str:
    return " ".join(f"{project}={role}" for project, role in roles.items())


def _changes(deed: DeedOut) -> str:
    names = dict.fromkeys((*deed.before, *deed.after))
    return ", ".join(f"{name}: {deed.before.get(name)} → {deed.after.get(name)}" for name in names)


def show_line(line: Mapping[str, JsonValue]) -> None:
    """An event or a metrics line: when, then what it says."""
    time = line.get("time")
    stamp = f"{datetime.fromtimestamp(time):%T}" if isinstance(time, int | float) else "--:--:--"
    said = " ".join(f"{name}={_short(value)}" for name, value in line.items() if name not in ("seq", "time"))
    _console.print(f"{stamp} {said}", markup=False)


def show_text(text: str) -> None:
    """A line as it is."""
    _console.print(text, markup=False)


def show_note(text: str) -> None:
    """A word to whoever waits, beside what the command prints."""
    _notes.print(text, markup=False)


def _progress(job: JobOut) -> str | None:
    done = job.progress
    if not done.step:
        return None
    loss = f" loss {done.loss:.4f}" if done.loss is not None else ""
    return f"{done.step}/{done.of or '?'}{loss}"


def _nodes(plan: PlanOut) -> str | None:
    return None if plan.nodes is None else "; ".join(_span(ranks) for ranks in plan.nodes)


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _short(value: JsonValue) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _facts(facts: Mapping[str, object]) -> None:
    for name, value in facts.items():
        if value is not None:
            _console.print(f"{name:>20}  {value}", markup=False)


def _table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """One line a row, cut at the terminal's edge: what is long comes last, and `trainshed show` has the whole of it."""
    lines = [names, *(tuple(cell.partition("\n")[0] for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        show_text((padded[: _console.width] if _console.is_terminal else padded).rstrip())
