"""/jobs/{id}/…: what a run leaves behind: events, metrics, logs."""

import re
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from service.api.guard import refuse_streams, require_key
from service.api.jobs import UseCases
from service.api.schemas import LinePage, TextPage
from service.errors import InvalidRequest
from service.ports import Cursor, Line, LogSource, RunDirs
from train_loop.spec import Problem

router = APIRouter(prefix="/jobs/{job_id}", tags=["runs"], dependencies=[Depends(require_key), Depends(refuse_streams)])
Limit = Annotated[int, Query(ge=1, le=1000)]


def run_dirs_of(request: Request) -> RunDirs:
    """The run directories of the app that serves this request."""
    run_dirs: RunDirs = request.app.state.run_dirs
    return run_dirs


Dirs = Annotated[RunDirs, Depends(run_dirs_of)]


def line_cursor(
    after: Annotated[str | None, Query(description='"<attempt>.<seq>" of the last line seen')] = None,
) -> Cursor:
    """The cursor of lines merged over attempts. Raises InvalidRequest."""
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,15})", after or "0.0")
    if match is None:
        raise InvalidRequest([Problem("/query/after", f"{after!r} is no <attempt>.<seq>; use `next` of a page")])
    return Cursor(int(match[1]), int(match[2]))


After = Annotated[Cursor, Depends(line_cursor)]


@router.get("/events")
def events(jobs: UseCases, dirs: Dirs, job_id: str, after: After, limit: Limit = 100) -> LinePage:
    """What happened, oldest first, over all attempts."""
    return _page(dirs.events(jobs.find(job_id).run_dir, after=after, limit=limit + 1), after, limit)


@router.get("/metrics")
def metrics(jobs: UseCases, dirs: Dirs, job_id: str, after: After, limit: Limit = 100) -> LinePage:
    """One line per logged optimizer step, over all attempts."""
    return _page(dirs.metrics(jobs.find(job_id).run_dir, after=after, limit=limit + 1), after, limit)


@router.get("/logs")
def logs(
    jobs: UseCases,
    dirs: Dirs,
    job_id: str,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    rank: Annotated[int | None, Query(ge=0, description="default: the driver")] = None,
    after: Annotated[int, Query(ge=0, description="byte offset: `next` of a page")] = 0,
    limit: Limit = 100,
) -> TextPage:
    """Whole lines of one log; only lines that are complete."""
    page = dirs.log(jobs.find(job_id).run_dir, LogSource(attempt, rank), after=after, limit=limit)
    return TextPage(data=list(page.lines), has_more=page.has_more, next=str(page.next))


def _page(lines: Sequence[Line], after: Cursor, limit: int) -> LinePage:
    """A page and the cursor behind it, which stays where it was while nothing is new."""
    data = [dict(line) for line in lines[:limit]]
    end = f"{data[-1]['attempt']}.{data[-1]['seq']}" if data else f"{after.attempt}.{after.seq}"
    return LinePage(data=data, has_more=len(lines) > limit, next=end)
