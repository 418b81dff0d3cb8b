"""/usage: what projects have used of the cluster, by day."""

from dataclasses import asdict
from datetime import date, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from service.api.guard import require_key
from service.api.jobs import UseCases
from service.domain.usage import UsageByDay, day_of

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
    def of(cls, found: UsageByDay) -> "UsageDays":
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
    today = day_of(jobs.clock())
    return UsageDays.of(
        jobs.usage(
            since or today - timedelta(days=_DAYS),
            until or today,
            projects=None if project is None else frozenset({project}),
        )
    )
