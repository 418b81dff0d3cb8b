"""`trainshed submit`, `clone`, `plan`, `ps`, `show`, `pause`, `resume`, `cancel`, `rm`."""

from typing import Annotated

import typer

from service.api.schemas import JobOut, JobPage
from service.domain.jobs.job import JobState
from trainshed import ApiError
from trainshed.cli.commands.watch import wait_for_end
from trainshed.cli.connect import connect, newest_event
from trainshed.cli.ids import find_job
from trainshed.cli.options import (
    After,
    AsJson,
    Grace,
    IdempotencyOption,
    JobRef,
    Overrides,
    SpecFile,
    Wait,
    read_overrides,
    read_pairs,
    read_spec,
)
from trainshed.cli.output.describe import show_score
from trainshed.cli.output.jobs import show_job, show_jobs
from trainshed.cli.output.plan import show_plan
from trainshed.cli.output.printing import Gone, next_command, show_json, show_next, show_note, show_text
from trainshed.cli.spec_text import SpecText

Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="GPU to plan for, such as h100-80g [default: that of the cluster]")
]


def submit(
    spec: SpecFile,
    overrides: Overrides = None,
    wait: Wait = False,
    idempotency_key: IdempotencyOption = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and print its id."""
    body, text = read_spec(spec, overrides or ())
    with connect(text) as api:
        made = api.submit(body, idempotency_key=idempotency_key)
    _started(made, wait=wait, as_json=as_json)


def clone(
    job: JobRef,
    step: Annotated[
        int | None, typer.Option(min=0, help="checkpoint to start from [default: the newest; 0: start from scratch]")
    ] = None,
    overrides: Overrides = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job that starts from a checkpoint of another job, with changes to its spec."""
    merged = read_overrides(overrides or ())
    with connect(SpecText("", b"", overrides or ())) as api:
        made = api.clone(find_job(api, job), from_checkpoint=step, overrides=merged)
    _started(made, wait=wait, as_json=as_json)


def plan(
    spec: SpecFile,
    device: Device = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="list changes with which the plan fits the GPU, cheapest first")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Validate a spec and show its mesh, batch size, steps and memory, without submitting it.

    With GPUs, compare its memory with theirs and forecast tokens per second.
    """
    body, text = read_spec(spec, overrides or ())
    with connect(text) as api:
        answer = api.plan(body, device=device, suggest=suggest)
    if as_json:
        show_json(answer)
        return
    show_plan(answer)
    show_next(f"submit {spec}")


def ps(
    state: Annotated[list[JobState] | None, typer.Option(help="only these states", case_sensitive=False)] = None,
    project: Annotated[str | None, typer.Option(help="only this project")] = None,
    name: Annotated[str | None, typer.Option(help="only jobs with this name")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="only jobs with all of these labels")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="maximum number of jobs")] = 50,
    after: After = None,
    every: Annotated[bool, typer.Option("--all", help="print all pages")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    labels = read_pairs(label or (), "--label")
    with connect() as api:

        def page_after(cursor: str | None) -> JobPage:
            return api.jobs(states=state or (), project=project, name=name, labels=labels, after=cursor, limit=limit)

        page = page_after(after)
        while every and page.has_more:
            following = page_after(page.next)
            page = following.model_copy(update={"data": [*page.data, *following.data]})
    if as_json:
        show_json(page)
        return
    show_jobs(page.data)
    if page.has_more:
        show_next(f"ps --after {page.next} (or --all)")
    else:
        show_next(next_command(page.data[0]) if page.data else "submit FILE")


def show(job: JobRef, as_json: AsJson = False) -> None:
    """Show the details of a job, and the score of its forecast if it has one."""
    with connect() as api:
        found = api.job(find_job(api, job))
        if as_json:
            show_json(found)
            return
        show_job(found)
        try:
            score = newest_event(api, found.id, "forecast_scored")
        except ApiError as error:  # the details do not need the run directory
            show_note(f"the score of its forecast cannot be read: {error}")
        else:
            show_score(score)
    show_next(next_command(found))


def pause(job: JobRef, grace: Grace = None, as_json: AsJson = False) -> None:
    """Pause a job: commit a checkpoint and leave the cluster until it is resumed."""
    with connect() as api:
        _show_requested(api.pause(find_job(api, job), grace_seconds=grace), as_json=as_json)


def resume(
    job: JobRef,
    workers: Annotated[int | None, typer.Option(min=1, help="number of workers [default: unchanged]")] = None,
    as_json: AsJson = False,
) -> None:
    """Resume a paused job from its newest checkpoint. With --workers, change the size of a paused or running job."""
    with connect() as api:
        job_id = find_job(api, job)
        scaling = api.job(job_id).scaling.at(workers) if workers else None
        _show_requested(api.resume(job_id, scaling=scaling), as_json=as_json)


def cancel(
    job: JobRef,
    grace: Grace = None,
    checkpoint: Annotated[bool, typer.Option(help="save a checkpoint first")] = True,
    as_json: AsJson = False,
) -> None:
    """Cancel a job. It cannot be resumed afterwards."""
    with connect() as api:
        _show_requested(api.cancel(find_job(api, job), grace_seconds=grace, checkpoint=checkpoint), as_json=as_json)


def rm(job: JobRef, as_json: AsJson = False) -> None:
    """Delete a finished job without confirmation. Its run directory is kept."""
    with connect() as api:
        job_id = find_job(api, job)
        api.delete(job_id)
    if as_json:
        show_json(Gone(id=job_id))
        return
    show_text(f"deleted {job_id}")
    show_next("ps")


def _started(job: JobOut, *, wait: bool, as_json: bool) -> None:
    """Print a new job. Its id is printed before any wait, so that scripts have it at once."""
    if not as_json:
        show_text(job.id)
        for warning in job.warnings:
            show_note(f"warning: {warning}")
    if wait:
        wait_for_end(job.id, as_json=as_json)
    elif as_json:
        show_json(job)
    else:
        show_next(next_command(job))


def _show_requested(job: JobOut, *, as_json: bool) -> None:
    """Print a job after a request to change its state."""
    if as_json:
        show_json(job)
        return
    show_text(f"{job.id} is {job.state}")
    show_next(next_command(job))
