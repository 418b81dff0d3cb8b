"""/usage: cluster usage of projects, by day."""

from datetime import date, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BeforeValidator

from service.api.authentication import CallerIs, require_key
from service.api.convert import usage_days
from service.api.routes.jobs import UseCases
from service.api.schemas import UsageDays
from service.domain.jobs.usage import day_of
from service.errors import InvalidRequest
from train_loop.spec import Problem

router = APIRouter(tags=["usage"], dependencies=[Depends(require_key)])
_DAYS = 30
Day = Annotated[date, BeforeValidator(date.fromisoformat)]
"""A date in ISO format; a number of seconds is not accepted."""


@router.get("/usage")
def usage(
    caller: CallerIs,
    jobs: UseCases,
    since: Annotated[Day | None, Query(description="first day, UTC; default: 30 days ago")] = None,
    until: Annotated[Day | None, Query(description="last day; default: today")] = None,
    project: str | None = None,
) -> UsageDays:
    """List worker, CPU and GPU hours by project and day. Days without usage are omitted."""
    today = day_of(jobs.clock())
    first, last = since or today - timedelta(days=_DAYS), until or today
    if first > last:
        fault = f"the first day, {first}, is after the last, {last}; choose an earlier first day"
        raise InvalidRequest([Problem("/query/since", fault)])
    projects = None if project is None else frozenset({project})
    return usage_days(jobs.usage(caller, first, last, projects=projects))
