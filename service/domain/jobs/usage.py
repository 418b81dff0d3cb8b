"""Cluster usage of jobs, in total and by day. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from service.domain.jobs.job import Attempt, Job

_HOUR, _DAY = 3600.0, timedelta(days=1)


@dataclass(frozen=True)
class Usage:
    """Hours of workers, and of the CPUs and GPUs reserved for them."""

    worker_hours: float = 0.0
    cpu_hours: float = 0.0
    gpu_hours: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.worker_hours + other.worker_hours,
            self.cpu_hours + other.cpu_hours,
            self.gpu_hours + other.gpu_hours,
        )


UsageByDay = Mapping[tuple[str, date], Usage]
"""Usage by project and day (UTC); days without usage are left out."""


def usage_of(job: Job, *, since: float = 0.0, until: float) -> Usage:
    """Return the usage of a job between two times (Unix seconds). An attempt uses its resources until it ends."""
    return sum((_used(attempt, job, since, until) for attempt in job.attempts), Usage())


def usage_by_day(jobs: Iterable[Job], *, since: float, until: float) -> UsageByDay:
    """Return the usage of jobs between two times (Unix seconds), by project and day."""
    found: dict[tuple[str, date], Usage] = {}
    for job in jobs:
        for day, begin, end in _days(job, since, until):
            used = usage_of(job, since=begin, until=end)
            if used != Usage():
                key = (job.spec.project, day)
                found[key] = found.get(key, Usage()) + used
    return found


def merge_usage(one: UsageByDay, other: UsageByDay) -> UsageByDay:
    """Add two usages."""
    return {key: one.get(key, Usage()) + other.get(key, Usage()) for key in (*one, *other)}


def day_of(moment: float) -> date:
    """Return the day (UTC) of a time (Unix seconds)."""
    return datetime.fromtimestamp(moment, UTC).date()


def begin_of(day: date) -> float:
    """Return the start of a day (UTC) in Unix seconds."""
    return datetime.combine(day, time(), UTC).timestamp()


def _days(job: Job, since: float, until: float) -> Iterable[tuple[date, float, float]]:
    first = max(since, job.started_at or until)
    last = min(until, job.finished_at or until)
    day = day_of(first)
    while begin_of(day) < last:
        yield day, max(begin_of(day), since), min(begin_of(day + _DAY), until)
        day += _DAY


def _used(attempt: Attempt, job: Job, since: float, until: float) -> Usage:
    begin = max(attempt.submitted_at or attempt.started_at, since)
    hours = max(min(attempt.ended_at or until, until) - begin, 0.0) / _HOUR * attempt.workers
    each = attempt.resources or job.size.resources_per_worker
    return Usage(hours, hours * each.get("CPU", 0.0), hours * each.get("GPU", 0.0))
