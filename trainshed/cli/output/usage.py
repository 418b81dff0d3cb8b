"""Text output of usage."""

from collections.abc import Iterable

from service.api.schemas import UsageOut
from trainshed.cli.output.printing import show_table


def show_usage(days: Iterable[UsageOut]) -> None:
    """Print usage hours, one row per day and project."""
    hours = ((day, (day.worker_hours, day.cpu_hours, day.gpu_hours)) for day in days)
    rows = ((f"{day.day:%F}", day.project, *(f"{used:,.2f}" for used in parts)) for day, parts in hours)
    show_table(("day", "project", "worker hours", "CPU hours", "GPU hours"), rows)
