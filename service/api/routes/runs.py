"""/jobs/{id}/…: events, metrics and logs of a run, in pages or as a stream, its audit, and results of inference."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from service.api.authentication import CallerIs, require_key
from service.api.concurrency_limits import FairThreads
from service.api.convert import run_audit_out
from service.api.openapi import Answers
from service.api.query_parameters import ANY_CASE
from service.api.routes.jobs import UseCases, claim_for
from service.api.schemas import Level, LinePage, RunAuditOut, TextPage
from service.api.sse import Streams, asks_for_stream
from service.domain.jobs.job import Job
from service.domain.runs.json_lines import Line
from service.errors import InvalidRequest
from service.ports import Cursor, LogOffset, LogSource, RunDirs
from service.use_cases.runs.audit import audit_job
from service.use_cases.runs.filters import AtLeast, Filter, WithoutTracebacks, downsample
from service.use_cases.runs.filters import contains as containing
from service.use_cases.runs.results import read_results
from service.use_cases.runs.streams import Reader, read_lines, read_page
from train_loop.spec import Problem

router = APIRouter(prefix="/jobs/{job_id}", tags=["runs"], dependencies=[Depends(require_key)])
Limit = Annotated[int, Query(ge=1, le=1000)]
_STREAM: Answers = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


class Log(NamedTuple):
    """A log, and the default position to read it from."""

    reader: Reader
    begin: LogOffset


async def run_dirs_of(request: Request) -> RunDirs:
    """Return the run directories of the app that serves this request."""
    run_dirs: RunDirs = request.app.state.run_dirs
    return run_dirs


Dirs = Annotated[RunDirs, Depends(run_dirs_of)]


async def cursor_of(
    request: Request,
    after: Annotated[str | None, Query(description="`next` of a page, or the id of a message")] = None,
    last_event_id: Annotated[
        str | None, Header(description="to resume a stream: id of the last message, in place of `after`")
    ] = None,
) -> tuple[int, int] | None:
    """Return both numbers of the cursor. A reconnecting stream sends it as a header. Raises InvalidRequest."""
    given = (last_event_id if asks_for_stream(request) else None) or after
    if given is None:
        return None
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,15})", given)
    if match is None:
        raise InvalidRequest([Problem("/query/after", f"invalid cursor {given!r}; expected `next` of a page")])
    return int(match[1]), int(match[2])


After = Annotated[tuple[int, int] | None, Depends(cursor_of)]


Contains = Annotated[str | None, Query(min_length=1, description="only lines that contain this text")]


async def filters_of(
    contains: Contains = None,
    level: Annotated[Level | None, ANY_CASE, Query(description="minimum level, case-insensitive")] = None,
) -> tuple[Filter, ...]:
    """Return the filters that select lines of a log."""
    # The level filter comes first: it must see every line.
    return ((AtLeast(level),) if level else ()) + ((containing(contains),) if contains else ())


@router.get("/events", response_model=LinePage, responses=_STREAM)
def events(
    caller: CallerIs,
    jobs: UseCases,
    dirs: Dirs,
    streams: Streams,
    job_id: str,
    after: After,
    contains: Contains = None,
    limit: Limit = 100,
) -> LinePage | Response:
    """List the events of a run over all attempts, oldest first."""
    reader, cursor = _reader(dirs, jobs.find(caller, job_id), "events", contains), Cursor(*(after or (0, 0)))
    return streams.lines(reader, cursor, job_id) if streams.wanted else _page(reader, cursor, limit)


@router.get("/metrics", response_model=LinePage, responses=_STREAM)
def metrics(
    caller: CallerIs,
    jobs: UseCases,
    dirs: Dirs,
    streams: Streams,
    job_id: str,
    after: After,
    points: Annotated[
        int | None, Query(ge=2, le=10_000, description="downsample to at most this number of lines")
    ] = None,
    limit: Limit = 100,
) -> LinePage | Response:
    """List one line per logged optimizer step, over all attempts. With `points`, downsample but keep the extremes."""
    reader, cursor = _reader(dirs, jobs.find(caller, job_id), "metrics"), Cursor(*(after or (0, 0)))
    if streams.wanted:
        return streams.lines(reader, cursor, job_id)
    if points is None:
        return _page(reader, cursor, limit)
    return _thinned(reader, cursor, points)


@router.get("/audit")
async def audit(request: Request, caller: CallerIs, jobs: UseCases, dirs: Dirs, job_id: str) -> RunAuditOut:
    """Check which samples the steps of a job trained, over all attempts; needs `training.audit_samples: true`."""
    # Reads all metrics lines twice, so it uses separate threads.
    threads: FairThreads = request.app.state.slow_reads
    claim = await claim_for(caller, jobs, job_id)
    found = await threads.run(request, claim, lambda end: audit_job(dirs, jobs.find(caller, job_id), end))
    return run_audit_out(found)


@router.get("/results", response_model=LinePage)
async def results(
    request: Request,
    caller: CallerIs,
    jobs: UseCases,
    job_id: str,
    after: Annotated[int | None, Query(ge=0, lt=10**15, description="id of the last row that is known")] = None,
    limit: Limit = 100,
) -> Response:
    """List committed rows of an inference job by their ids. A page has at most 8 MiB of rows, and at least one.

    Later rows may still be committed if the job has not ended: read on from the last id.
    """
    # A separate process reads each page.
    threads: FairThreads = request.app.state.result_reads
    claim = await claim_for(caller, jobs, job_id)
    read = partial(read_results, jobs, request.app.state.result_pages, caller, job_id, after=after, limit=limit)
    content = await threads.run(request, claim, lambda end: read(cancellation=end))
    return Response(content, media_type="application/json")


def log_of(
    caller: CallerIs,
    jobs: UseCases,
    dirs: Dirs,
    job_id: str,
    attempt: Annotated[
        int | None, Query(ge=1, lt=10**9, description="only this attempt; default: the newest and later ones")
    ] = None,
    rank: Annotated[int | None, Query(ge=0, description="default: the driver")] = None,
    raw: Annotated[bool, Query(description="the driver's log as it is, with tracebacks")] = False,
    filters: Annotated[tuple[Filter, ...], Depends(filters_of)] = (),
) -> Log:
    """Return the requested log. Raises JobNotFound, or InvalidRequest if no attempt can have written it."""
    job = jobs.find(caller, job_id)
    if attempt is not None and attempt > len(job.attempts) + 1:
        known = f"the job has had {len(job.attempts)}; ask for one of these, or for the next one"
        raise InvalidRequest([Problem("/query/attempt", f"attempt {attempt} not found: {known}")])
    if rank is not None and rank >= job.most_workers:
        known = f"the job has had {job.most_workers} workers at most; ask for a rank from 0 to {job.most_workers - 1}"
        raise InvalidRequest([Problem("/query/rank", f"rank {rank} not found: {known}")])
    if rank is None and not raw:
        # The log of a rank has the traceback of its error. This filter comes first: it must see every line.
        filters = (WithoutTracebacks(), *filters)
    reader = Reader(dirs, job.run_dir, LogSource("log", rank), stays=attempt is not None, filters=filters)
    return Log(reader, LogOffset(attempt or dirs.newest_attempt(job.run_dir)))


@router.get("/logs", response_model=TextPage, responses=_STREAM)
def logs(
    streams: Streams, job_id: str, log: Annotated[Log, Depends(log_of)], after: After, limit: Limit = 100
) -> TextPage | Response:
    """List the complete lines of one log."""
    place = LogOffset(*after) if after else log.begin
    if streams.wanted:
        return streams.text(log.reader, place, job_id)
    batch = log.reader.read(place, limit=limit)
    end = f"{batch.place.attempt}.{batch.place.offset}"
    return TextPage(data=[entry.text for entry in batch.entries], has_more=batch.more, next=end)


def _reader(dirs: RunDirs, job: Job, kind: Literal["events", "metrics"], contains: str | None = None) -> Reader:
    return Reader(dirs, job.run_dir, LogSource(kind), filters=(containing(contains),) if contains else ())


def _thinned(reader: Reader, after: Cursor, points: int) -> LinePage:
    """Return all lines after a cursor, downsampled to at most `points` lines."""
    end = after

    def lines() -> Iterator[Line]:
        nonlocal end
        for one in read_lines(reader, after):
            end = one.cursor
            yield one.line

    return LinePage(data=[dict(line) for line in downsample(lines(), points=points)], has_more=False, next=str(end))


def _page(reader: Reader, after: Cursor, limit: int) -> LinePage:
    """Return a page and the cursor after it. The cursor is unchanged if the page is empty."""
    found, more = read_page(reader, after, limit)
    end = found[-1].cursor if found else after
    return LinePage(data=[dict(one.line) for one in found], has_more=more, next=str(end))
