"""`trainshed audit` and `usage`: the audit log, the audit of a run, and the hours of projects."""

from datetime import datetime
from typing import Annotated

import typer

from service.api.schemas import RunAuditOut
from trainshed.cli.connect import connect
from trainshed.cli.exit_codes import Exit, fail
from trainshed.cli.ids import complete_job, find_job
from trainshed.cli.options import JOB_HELP, AsJson
from trainshed.cli.output.access import show_audit
from trainshed.cli.output.printing import show_facts, show_json, show_next, show_text
from trainshed.cli.output.usage import show_usage

Job = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help=f"audit the samples that this job trained, instead of showing the audit log: {JOB_HELP}",
        autocompletion=complete_job,
        show_default=False,
    ),
]
Project = Annotated[str | None, typer.Option(help="audit log: only this project")]
After = Annotated[int | None, typer.Option(min=1, help="audit log: `next` of the previous page")]
Limit = Annotated[int, typer.Option(min=1, max=200, help="audit log: maximum number of entries")]
AllowRepeated = Annotated[
    bool, typer.Option("--allow-repeated", help="run audit: exit with 0 if nothing is wrong but steps trained again")
]


def audit(
    job: Job = None,
    project: Project = None,
    after: After = None,
    limit: Limit = 50,
    allow_repeated: AllowRepeated = False,
    as_json: AsJson = False,
) -> None:
    """Show the audit log, newest first. With JOB, check the samples that its steps trained, over all attempts.

    With JOB, exits with 1 if steps were trained again, or samples are duplicated, missing or out of order.
    """
    if job is not None:
        if project is not None or after is not None:
            fail("--project and --after belong to the audit log; leave them out, or leave out JOB", code=Exit.USAGE)
        _audit_run(job, allow_repeated=allow_repeated, as_json=as_json)
    with connect() as api:
        page = api.audit(project=project, after=after, limit=limit)
    if as_json:
        show_json(page)
        return
    show_audit(page.data)
    show_next(f"audit --after {page.next}" if page.has_more else "keys ls")


def _audit_run(job: str, *, allow_repeated: bool, as_json: bool) -> None:
    with connect() as api:
        job_id = find_job(api, job)
        found = api.audit_job(job_id)
    if as_json:
        show_json(found)
    else:
        show_run_audit(found)
        show_next(f"metrics {job_id} --lines")
    repeated = found.repeated.total and not allow_repeated
    raise typer.Exit(Exit.FAILED if repeated or not found.clean else Exit.DONE)


def _result(found: RunAuditOut) -> str:
    if not found.clean:
        return "samples are wrong"
    return "clean, but steps were trained again (--allow-repeated accepts them)" if found.repeated.total else "clean"


def show_run_audit(found: RunAuditOut) -> None:
    """Print a run audit: its totals, then each listed finding."""
    steps = f"{found.steps:,} ({found.first_step} to {found.last_step})" if found.steps else "0"
    show_facts(
        {
            "result": _result(found),
            "steps": steps,
            "samples": f"{found.samples:,}",
            "steps trained again": found.repeated.total,
            "duplicated samples": found.duplicated.total,
            "missing steps": found.missing_steps.total,
            "missing samples": found.missing_samples.total,
            "out of order": found.out_of_order.total,
            "changed losses": found.changed_losses.total,
            "superseded lines": found.superseded_lines,
        }
    )
    for line in _findings(found):
        show_text(line)


def _findings(found: RunAuditOut) -> list[str]:
    return [
        *(
            f"attempt {r.attempt} resumed from step {r.resumed_from}: {r.steps} steps again"
            for r in found.repeated.listed
        ),
        *(
            f"sample {d.sample} in steps {d.first_step} and {d.step} of data epoch {d.data_epoch}"
            for d in found.duplicated.listed
        ),
        *(f"steps {gap.first_step} to {gap.last_step} have no line" for gap in found.missing_steps.listed),
        *(f"sample {u.sample} is missing in data epoch {u.data_epoch}" for u in found.missing_samples.listed),
        *(f"step {d.step}, attempt {d.attempt}: {d.message}" for d in found.out_of_order.listed),
        *(
            f"step {c.step}: loss {c.loss:.9g} in attempt {c.attempt}, "
            f"{c.earlier_loss:.9g} in attempt {c.earlier_attempt}"
            for c in found.changed_losses.listed
        ),
        *(f"note: {note}" for note in found.notes),
    ]


def usage(
    since: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="first day, UTC; default: 30 days ago"),
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="last day; default: today")
    ] = None,
    project: Annotated[str | None, typer.Option(help="only this project")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the worker, CPU and GPU hours of each project on each day."""
    with connect() as api:
        answer = api.usage(since=since and since.date(), until=until and until.date(), project=project)
    if as_json:
        show_json(answer)
        return
    show_usage(answer.data)
    show_next("ps --state RUNNING")
