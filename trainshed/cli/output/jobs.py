"""Text output of jobs: one line, a table row, or a list of facts."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from rich.text import Text

from service.api.schemas import JobOut
from service.domain.jobs.job import JobState
from train_loop.plan import mesh_of
from trainshed.cli.ids import shorten
from trainshed.cli.output.plan import mesh_facts
from trainshed.cli.output.printing import show_facts, show_note, show_table, show_text

_STYLES = {
    JobState.QUEUED: "cyan",
    JobState.STARTING: "blue",
    JobState.RUNNING: "green",
    JobState.RECOVERING: "yellow",
    JobState.PAUSING: "magenta",
    JobState.PAUSED: "magenta",
    JobState.CANCELLING: "yellow",
    JobState.CANCELLED: "dim",
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
}
_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def show_job(job: JobOut) -> None:
    """Print a job, one fact per line."""
    show_facts(
        {
            "id": job.id,
            "name": job.name,
            "project": job.project,
            "state": job.state,
            "reason": job.reason.message if job.reason else None,
            "what helps": job.reason.remedy if job.reason else None,
            "starts from": f"step {job.parent.step} of {job.parent.job}" if job.parent else None,
            "progress": progress_of(job) or None,
            **_mesh(job),
            "attempt": job.attempt,
            "restarts": job.restarts,
            "steps trained again" if job.spec.trains else "rows computed again": job.lost_work.steps,
            "GPU hours": job.gpu_hours,
            "run directory": job.run_dir,
            "dashboard": job.dashboard_url,
        }
    )


def _mesh(job: JobOut) -> dict[str, str | None]:
    """Return the facts about the mesh of the newest or the next attempt; none for jobs of older rules."""
    with suppress(ValueError):
        return mesh_facts(mesh_of(job.spec.scaled(job.scaling).run))
    return {}


def show_failure(job: JobOut) -> None:
    """Print code, message and remedy of a failed job, above its log; nothing for other jobs."""
    if job.state is not JobState.FAILED or job.reason is None:
        return
    show_text(f"{job.id} FAILED: {job.reason.code}: {job.reason.message}")
    if job.reason.remedy:
        show_text(f"what helps: {job.reason.remedy}")
    show_text("")
    show_note(f"tracebacks of the driver: trainshed logs {job.id} --raw; of a rank: --rank N")


def show_jobs(jobs: Sequence[JobOut]) -> None:
    """Print jobs, one per row."""
    now = datetime.now(UTC)
    rows = (
        (short, job.name, job.project, state_of(job), progress_of(job), age(job, now), why(job))
        for short, job in zip(shorten([job.id for job in jobs]), jobs, strict=True)
    )
    show_table(("id", "name", "project", "state", "progress", "age", "reason"), rows)


def state_of(job: JobOut) -> Text:
    """Return the state in its colour."""
    return Text(job.state.value, _STYLES[job.state])


def progress_of(job: JobOut) -> str:
    """Return the steps done and the loss; empty before the first step."""
    done = job.progress
    if not done.step:
        return ""
    loss = f" loss {done.loss:.4f}" if done.loss is not None else ""
    unit = "" if done.unit == "step" else f" {done.unit}s"
    return f"{done.step}/{done.of or '?'}{unit}{loss}"


def pace_of(job: JobOut) -> str:
    """Return throughput and remaining time; empty if the job has finished."""
    done, parts = job.progress, list[str]()
    if job.state.terminal:
        return ""
    if done.tokens_per_second is not None:
        parts.append(f"{done.tokens_per_second:,.0f} tok/s")
    if done.eta_seconds is not None:
        parts.append(f"{span(done.eta_seconds)} left")
    return ", ".join(parts)


def why(job: JobOut) -> str:
    """Return the job's position in the queue and the reason for its state."""
    place = f"{job.progress.place}. in the queue" if job.progress.place else ""
    return ": ".join(part for part in (place, job.reason.message if job.reason else "") if part)


def age(job: JobOut, now: datetime) -> str:
    """Return the time since the job was submitted."""
    return span((now - job.created_at).total_seconds())


def span(seconds: float) -> str:
    """Format seconds with the two largest units."""
    left, parts = max(0, int(seconds)), list[str]()
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"
