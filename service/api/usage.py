"""/usage: what projects have used of the cluster, by day."""

from datetime import date, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BeforeValidator

from service.api.guard import require_key
from service.api.jobs import UseCases
from service.api.usage_schemas import UsageDays
from service.domain.usage import day_of

router = APIRouter(tags=["usage"], dependencies=[Depends(require_key)])
_DAYS = 30
Day = Annotated[date, BeforeValidator(date.fromisoformat)]
"""As it is written, and no number of seconds."""


@router.get("/usage")
def usage(
    jobs: UseCases,
    since: Annotated[Day | None, Query(description="first day, UTC; default: 30 days ago")] = None,
    until: Annotated[Day | None, Query(description="last day; default: today")] = None,
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
