"""`trainshed events`, `metrics`, `logs`, `describe` and `results`: what a run wrote; `diff` compares two runs."""

import math
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, RootModel

from service.api.schemas import DigestsOut, JobOut, Level, LinePage, TextPage
from train_loop.run_dir import RunDir, storage_failed
from train_loop.spec import InferJobSpec
from trainshed import Api, Line
from trainshed.cli.comparison import compare, values_by_step
from trainshed.cli.connect import LONG_SECONDS, SHORT_SECONDS, connect, newest_event
from trainshed.cli.exit_codes import Exit, detach_on_interrupt, fail
from trainshed.cli.ids import complete_job, find_job
from trainshed.cli.lazy import lazily
from trainshed.cli.options import JOB_HELP, After, AsJson, AsJsonLines, Follow, JobRef, Limit
from trainshed.cli.output.describe import show_built, show_score
from trainshed.cli.output.differences import show_difference
from trainshed.cli.output.jobs import show_failure
from trainshed.cli.output.printing import next_command, show_json, show_line, show_next, show_note, show_text
from trainshed.cli.output.sparklines import show_curves

if TYPE_CHECKING:
    from train_loop.data import read_results
else:
    # Loads pyarrow, which would slow down all other commands.
    read_results = lazily("train_loop.data.read_results")

_POINTS = 1000
Contains = Annotated[str | None, typer.Option(metavar="TEXT", help="only lines that contain this text")]
Attempt = Annotated[int | None, typer.Option(min=1, help="attempt [default: the newest]")]
Rank = Annotated[int | None, typer.Option(min=0, help="rank [default: the driver]")]
AtLeast = Annotated[Level | None, typer.Option(help="minimum level", case_sensitive=False)]
Points = Annotated[
    int | None, typer.Option(min=2, max=10_000, help="downsample to at most this number of lines (not with --follow)")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="print the driver's log as it is: without the reason, with tracebacks")
]
AsLines = Annotated[bool, typer.Option("--lines", help="print one line per entry with all values, as --follow does")]
_LINES = 1000
JobA = Annotated[str, typer.Argument(metavar="JOB_A", help=JOB_HELP, autocompletion=complete_job)]
JobB = Annotated[str, typer.Argument(metavar="JOB_B", help="the job to compare it with", autocompletion=complete_job)]
AtStep = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        help="compare the checkpoints of this step, and metrics up to it [default: the newest step in common]",
        show_default=False,
    ),
]


class Description(BaseModel):
    """JSON output of `trainshed describe`: events."""

    model_built: Line
    micro_batch_chosen: Line | None
    forecast_scored: Line | None


class _One(RootModel[Line | str]):
    """One line as JSON."""


def events(
    job: JobRef,
    follow: Follow = False,
    contains: Contains = None,
    after: After = None,
    limit: Limit = 100,
    as_json: AsJsonLines = False,
) -> None:
    """Show the events of a job over all attempts, oldest first."""
    with _run(job, follow=follow) as (api, job_id):
        if follow:
            _follow(api, job_id, api.follow_events(job_id, after=after, contains=contains), as_json)
        else:
            page = api.events(job_id, after=after, contains=contains, limit=limit)
            _show(api, job_id, page, _command("events", job_id, contains=contains), as_json)


def logs(  # noqa: PLR0913 - each is an option of the command
    job: JobRef,
    follow: Follow = False,
    attempt: Attempt = None,
    rank: Rank = None,
    contains: Contains = None,
    level: AtLeast = None,
    after: After = None,
    limit: Limit = 1000,
    raw: Raw = False,
    as_json: AsJsonLines = False,
) -> None:
    """Show the log of the driver or of one rank. The log of a failed job begins with the reason."""
    with _run(job, follow=follow) as (api, job_id):
        if not (raw or as_json or after or contains or level):
            show_failure(api.job(job_id))
        if follow:
            lines = api.follow_logs(
                job_id, attempt=attempt, rank=rank, after=after, contains=contains, level=level, raw=raw
            )
            _follow(api, job_id, lines, as_json)
        else:
            page = api.logs(
                job_id, attempt=attempt, rank=rank, after=after, contains=contains, level=level, raw=raw, limit=limit
            )
            command = _command("logs", job_id, attempt=attempt, rank=rank, contains=contains, level=level, raw=raw)
            _show(api, job_id, page, command, as_json)


def metrics(
    job: JobRef,
    follow: Follow = False,
    lines: AsLines = False,
    points: Points = None,
    after: After = None,
    limit: Limit = 100,
    as_json: AsJsonLines = False,
) -> None:
    """Plot loss, throughput, gradient norm and learning rate. With --lines, print the metrics of each logged step."""
    with _run(job, follow=follow) as (api, job_id):
        if follow:
            _follow(api, job_id, api.follow_metrics(job_id, after=after), as_json)
        elif lines or as_json:
            page = api.metrics(job_id, after=after, points=points, limit=limit)
            _show(api, job_id, page, _command("metrics", job_id, lines=True), as_json)
        else:
            show_curves(api.metrics(job_id, after=after, points=points or _POINTS).data)
            show_next(f"metrics {job_id} --lines")


def describe(
    job: JobRef,
    tree: Annotated[bool, typer.Option("--tree", help="print the module tree, with FSDP units marked")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what was chosen for a run: FSDP units, mesh, dtypes, kernels, optimizer; and the score of its forecast."""
    with connect() as api:
        job_id = find_job(api, job)
        names = ("model_built", "micro_batch_chosen", "forecast_scored")
        built, micro_batch, score = (newest_event(api, job_id, event) for event in names)
    if built is None:
        fail(f"{job_id} has not built its model yet; `trainshed show {job_id}` shows its state")
    if as_json:
        show_json(Description(model_built=built, micro_batch_chosen=micro_batch, forecast_scored=score))
        return
    show_built(built, micro_batch, tree=tree)
    show_score(score)
    show_next(f"metrics {job_id}")


def diff(job_a: JobA, job_b: JobB, step: AtStep = None, as_json: AsJson = False) -> None:
    """Compare loss, gradient norm and tensors of two jobs, bit for bit. Exits with 1 if they differ.

    Compares the steps that both jobs have reached, then the newest checkpoint that both have. The number of workers
    does not matter.
    """
    with connect() as api:
        jobs = find_job(api, job_a), find_job(api, job_b)
        one, other = (values_by_step(_all_metrics(api, job), last=step) for job in jobs)
        digests = _digests(api, jobs, step)
    found = compare(jobs, (one, other), digests)
    if not found.steps and digests is None:
        fail(
            "nothing to compare: the jobs have no step and no checkpoint in common; see `trainshed metrics JOB --lines`"
        )
    if as_json:
        show_json(found)
    else:
        show_difference(found)
        show_next(f"metrics {jobs[0]} --lines")
    raise typer.Exit(Exit.DONE if found.identical else Exit.FAILED)


@contextmanager
def _run(job: str, *, follow: bool) -> Iterator[tuple[Api, str]]:
    """Yield the API and the job id. With `follow`, retry longer. Exit on Ctrl-C without affecting the job."""
    with connect(retry_seconds=LONG_SECONDS if follow else SHORT_SECONDS) as api:
        job_id = find_job(api, job)
        with detach_on_interrupt(job_id):
            yield api, job_id


def _follow(api: Api, job_id: str, lines: Iterable[Line | str], as_json: bool) -> None:
    for line in lines:
        show_json(_One(line), lines=True) if as_json else _show_one(line)
    if not as_json:
        show_next(next_command(api.job(job_id)))


def _show(api: Api, job_id: str, page: LinePage | TextPage, command: str, as_json: bool) -> None:
    if as_json:
        show_json(page)
        return
    for line in page.data:
        _show_one(line)
    if page.has_more:
        show_next(f"{command} --after {page.next}")
        return
    job = api.job(job_id)
    show_next(_after_end(job, command) if job.state.terminal else f"{command} --follow")


def _after_end(job: JobOut, command: str) -> str:
    """Return the suggested command for a job that has ended, unless it is the one that was just used."""
    found = next_command(job)
    return f"clone {job.id}" if command.startswith(found) else found


def _command(name: str, job_id: str, **options: str | int | None) -> str:
    """Return the command line that shows the same lines of a job, without options that are off."""
    given = {f"--{option}": value for option, value in options.items() if value is not None and value is not False}
    words = [option if value is True else f"{option}={shlex.quote(str(value))}" for option, value in given.items()]
    return " ".join([name, job_id, *words])


def _show_one(line: Line | str) -> None:
    show_text(line) if isinstance(line, str) else show_line(line)


def _all_metrics(api: Api, job_id: str) -> Iterator[Line]:
    more, after = True, None
    while more:
        page = api.metrics(job_id, after=after, limit=_LINES)
        yield from page.data
        more, after = page.has_more, page.next


def _digests(api: Api, jobs: tuple[str, str], step: int | None) -> tuple[DigestsOut, DigestsOut] | None:
    """Return the digests of a step, by default of the newest checkpoint that both jobs have; None if there is none."""
    if step is None:
        one, other = ({found.step for found in api.checkpoints(job).data} for job in jobs)
        step = max(one & other, default=None)
    return None if step is None else (api.digests(jobs[0], step), api.digests(jobs[1], step))


def results(
    job: JobRef,
    limit: Annotated[int, typer.Option(min=1, help="maximum number of rows (ignored with --output)")] = 20,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="write all rows to a new Parquet file")
    ] = None,
) -> None:
    """Print committed results of an inference job as JSON lines.

    Reads the job's run directory if this machine sees it, and otherwise asks the service.
    """
    with connect() as api:
        found = api.job(find_job(api, job))
        if found.spec.kind != "infer":
            fail(f"{found.id} is a job of kind: {found.spec.kind}, which has no results; see `trainshed checkpoints`")
        if output is not None and output.exists():
            fail(f"{output} exists; choose a new file")
        pages = partial(_result_pages, api, found.id)
        try:
            run_dir = RunDir.at(found.run_dir)
            if not run_dir.exists():
                raise FileNotFoundError(f"{found.run_dir} is not mounted")
            if output is None:
                _show_rows(islice(read_results.read_rows(run_dir), limit))
            else:
                _write_results(read_results.read_tables(run_dir), found.spec, output)
        except Exception as error:
            if not storage_failed(error):
                raise
            if output is None:
                _show_rows(row for page in pages(limit) for row in page)
            else:
                _write_results((read_results.read_json(page, found.spec) for page in pages()), found.spec, output)
    show_next(f"show {found.id}")


def _result_pages(api: Api, job_id: str, limit: float = math.inf) -> Iterator[list[Line]]:
    """Yield pages of rows that the service reads."""
    after, left, more = None, limit, True
    while left and more:
        page = api.results(job_id, after=after, limit=int(min(left, _LINES)))
        yield page.data
        after, left, more = page.next, left - len(page.data), page.has_more


def _show_rows(rows: Iterable[Line]) -> None:
    for row in rows:
        show_text(read_results.dump_row(row))


def _write_results(tables: Iterable[Any], spec: InferJobSpec, file: Path) -> None:
    show_note(f"{read_results.write_tables(tables, spec, file)} rows")
    show_text(str(file))
