"""/usage: what projects have used of the cluster, by day."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from service.api.guard import require_key
from service.api.jobs import UseCases
from service.api.schemas import UsageDays

router = APIRouter(tags=["usage"], dependencies=[Depends(require_key)])
_DAYS = 30


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
    return UsageDays.of(jobs.usage(_begin(first), _begin((until or today) + timedelta(days=1)), project=project))


def _begin(day: date) -> float:
    return datetime.combine(day, time(), UTC).timestamp()
