"""/usage: what projects have used of the cluster, by day."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from service.api.guard import require_key
from service.api.jobs import UseCases
from service.domain.usage import Usage

router = APIRouter(tags=["usage"], dependencies=[Depends(require_key)])
_DAYS = 30


class UsageOut(BaseModel):
    """What the jobs of a project used on a day."""

    project: str
    day: date = Field(description="UTC")
    worker_hours: float
    cpu_hours: float
    gpu_hours: float


class UsageDays(BaseModel):
    """By day, then by project."""

    data: list[UsageOut]

    @classmethod
    def of(cls, found: Mapping[tuple[str, date], Usage]) -> "UsageDays":
        """From the domain."""
        rows = sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
        return cls(data=[UsageOut(project=project, day=day, **asdict(used)) for (project, day), used in rows])


@router.get("/usage")
def usage(
    jobs: UseCases,
    since: Annotated[date | None, Query(description="first day, UTC; default: 30 days ago")] = None,
    until: Annotated[date | None, Query(description="last day; default: today")] = None,
    project: str | None = None,
) -> UsageDays:
    """Worker, CPU and GPU hours of each project on each day on which it had any."""
    today = datetime.fromtimestamp(jobs.clock(), UTC).date()
    first = since or today - timedelta(days=_DAYS)
    # Nothing is used after today, and there is no day after the last one.
    end = _begin(min(until or today, today) + timedelta(days=1))
    return UsageDays.of(jobs.usage(_begin(first), end, project=project))


def _begin(day: date) -> float:
    return datetime.combine(day, time(), UTC).timestamp()
