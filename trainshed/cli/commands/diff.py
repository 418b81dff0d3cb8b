"""`trainshed diff`: compares the metrics and a checkpoint of two jobs, bit for bit."""

from collections.abc import Iterator
from typing import Annotated

import typer

from service.api.schemas import DigestsOut, Line
from trainshed import Api
from trainshed.cli.comparison import compare, values_by_step
from trainshed.cli.connect import connect
from trainshed.cli.exit_codes import Exit, fail
from trainshed.cli.ids import complete_job, find_job
from trainshed.cli.options import JOB_HELP, AsJson
from trainshed.cli.output.differences import show_difference
from trainshed.cli.output.printing import show_json, show_next

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


def diff(job_a: JobA, job_b: JobB, step: AtStep = None, as_json: AsJson = False) -> None:
    """Compare loss, gradient norm and tensors of two jobs, bit for bit. Exits with 1 if they differ.

    Compares the steps that both jobs have reached, then the newest checkpoint that both have. The number of workers
    does not matter.
    """
    with connect() as api:
        jobs = find_job(api, job_a), find_job(api, job_b)
        one, other = (values_by_step(_metrics(api, job), last=step) for job in jobs)
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


def _metrics(api: Api, job_id: str) -> Iterator[Line]:
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
