"""The `trainshed` command: one short function per verb."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from service.api.ledger_schemas import ExportIn
from service.api.schemas import LinePage
from service.cli import keys
from service.cli.changes import read_changes
from service.cli.connect import connect
from service.cli.show import (
    show_checkpoints,
    show_job,
    show_jobs,
    show_json,
    show_line,
    show_note,
    show_plan,
    show_text,
)
from service.domain.job import JobState
from train_loop.run_dir import storage_path

_LOOK_SECONDS = 1.0
app = typer.Typer(no_args_is_help=True, add_completion=False, help="Distributed training jobs that survive faults.")

app.add_typer(keys.app, name="keys")
app.command()(keys.whoami)
app.command()(keys.audit)

SpecFile = Annotated[Path, typer.Argument(help="job spec in YAML or JSON; - reads standard input", allow_dash=True)]
JobId = Annotated[str, typer.Argument(help="id of a job, as `trainshed ps` shows it")]
AsJson = Annotated[bool, typer.Option("--json", help="the service's answer as it is")]
Dtype = Literal["bf16", "fp16", "fp32"]
Step = Annotated[int, typer.Argument(help="of a checkpoint, as `trainshed checkpoints` shows it", min=0)]
After = Annotated[str | None, typer.Option(help="cursor: `next` of the page before")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="lines at most")]


@app.command()
def serve() -> None:
    """Run the service in the foreground until SIGTERM or SIGINT."""
    # In this process's place: signals reach it, and the other commands need not load Ray.
    os.execv(sys.executable, [sys.executable, "-m", "service.serve"])


@app.command()
def submit(
    spec: SpecFile,
    idempotency_key: Annotated[str | None, typer.Option(help="a second call with it gives the same job")] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job."""
    with connect() as client:
        job = client.submit(_read(spec), idempotency_key=idempotency_key)
        show_json(job) if as_json else show_text(job.id)


@app.command()
def clone(
    job_id: JobId,
    step: Annotated[int | None, typer.Option(min=0, help="default: the newest checkpoint; 0: begin anew")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="in the spec")] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job that goes on from a checkpoint of another one, with some of its spec different."""
    overrides = read_changes(changes or [])
    with connect() as client:
        job = client.clone(job_id, from_checkpoint=step, overrides=overrides)
        show_json(job) if as_json else show_text(job.id)


@app.command()
def plan(spec: SpecFile, as_json: AsJson = False) -> None:
    """Show what a spec comes to, without submitting it."""
    with connect() as client:
        answer = client.plan(_read(spec))
        show_json(answer) if as_json else show_plan(answer)


@app.command()
def ps(
    state: Annotated[list[JobState] | None, typer.Option(help="only these states")] = None,
    project: Annotated[str | None, typer.Option(help="only this project")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with connect() as client:
        page = client.jobs(states=state or (), project=project, after=after, limit=limit)
        show_json(page) if as_json else show_jobs(page.data)


@app.command()
def show(job_id: JobId, as_json: AsJson = False) -> None:
    """Show one job."""
    with connect() as client:
        job = client.job(job_id)
        show_json(job) if as_json else show_job(job)


@app.command()
def events(job_id: JobId, after: After = None, limit: Limit = 100, as_json: AsJson = False) -> None:
    """Show what happened, over all attempts."""
    with connect() as client:
        _show_lines(client.events(job_id, after=after, limit=limit), as_json)


@app.command()
def metrics(job_id: JobId, after: After = None, limit: Limit = 100, as_json: AsJson = False) -> None:
    """Show the metrics of each logged step, over all attempts."""
    with connect() as client:
        _show_lines(client.metrics(job_id, after=after, limit=limit), as_json)


@app.command()
def logs(
    job_id: JobId,
    attempt: Annotated[int | None, typer.Option(min=1, help="default: the newest")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="default: the driver")] = None,
    after: After = None,
    limit: Limit = 1000,
    as_json: AsJson = False,
) -> None:
    """Show a log of the driver or of one rank."""
    with connect() as client:
        page = client.logs(job_id, attempt=attempt, rank=rank, after=after, limit=limit)
        if as_json:
            show_json(page)
        else:
            for line in page.data:
                show_text(line)


@app.command()
def checkpoints(job_id: JobId, as_json: AsJson = False) -> None:
    """List committed checkpoints."""
    with connect() as client:
        answer = client.checkpoints(job_id)
        show_json(answer) if as_json else show_checkpoints(answer)


@app.command()
def verify(job_id: JobId, step: Step, as_json: AsJson = False) -> None:
    """Read all of a checkpoint and hold it against its SHA-256 sums; exit code 1 where it is damaged."""
    with connect() as client:
        found = client.verify(job_id, step)
    if as_json:
        show_json(found)
    else:
        damage = f"the checkpoint of step {step} is damaged; a run resumes from the one before it\n"
        show_text(damage + "\n".join(found.faults) if found.faults else f"the checkpoint of step {step} is whole")
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def pin(job_id: JobId, step: Step, remove: Annotated[bool, typer.Option("--remove", help="unpin")] = False) -> None:
    """Keep a checkpoint whatever keep_last and keep_best say."""
    with connect() as client:
        kept = client.unpin(job_id, step) if remove else client.pin(job_id, step)
        show_text(f"the checkpoint of step {kept.step} is {'pinned' if kept.pinned else 'left to retention'}")


@app.command()
def export(
    job_id: JobId,
    step: Step,
    dtype: Annotated[Dtype | None, typer.Option(help="default: the job's model.dtype")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="the average of the weights instead of the weights")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint, wait for it, and print its path."""
    wish = ExportIn.model_validate({"dtype": dtype, "weights": "ema" if ema else "model"})
    with connect() as client:
        status, told = client.export(job_id, step, wish), None
        while status.state == "running":
            if told != (told := f"exporting: {status.progress:.0%}"):
                show_note(told)
            time.sleep(_LOOK_SECONDS)
            status = client.exported(job_id, step, wish)
    if as_json:
        show_json(status)
    elif status.state == "failed":
        print(f"trainshed: the export failed: {status.reason}", file=sys.stderr)
    else:
        # As from_pretrained takes it: a path on a file system, a URI elsewhere.
        show_text(str(storage_path(status.path)))
    raise typer.Exit(0 if status.state == "done" else 1)


@app.command()
def pause(
    job_id: JobId,
    grace: Annotated[float | None, typer.Option(min=0, help="seconds until it is ended by force")] = None,
    as_json: AsJson = False,
) -> None:
    """Commit a checkpoint and leave the cluster until the job is resumed."""
    with connect() as client:
        job = client.pause(job_id, grace_seconds=grace)
        show_json(job) if as_json else show_text(f"{job.id} is {job.state}")


@app.command()
def resume(
    job_id: JobId,
    workers: Annotated[int | None, typer.Option(min=1, help="default: as many as before")] = None,
    as_json: AsJson = False,
) -> None:
    """Let a paused job go on from its newest checkpoint."""
    with connect() as client:
        scaling = client.job(job_id).scaling.at(workers) if workers else None
        job = client.resume(job_id, scaling=scaling)
        show_json(job) if as_json else show_text(f"{job.id} is {job.state}")


@app.command()
def rm(job_id: JobId) -> None:
    """Forget a job that has ended; its run directory stays."""
    with connect() as client:
        client.delete(job_id)
        show_text(f"{job_id} is forgotten")


@app.command()
def cancel(
    job_id: JobId,
    grace: Annotated[float | None, typer.Option(min=0, help="seconds until it is ended by force")] = None,
    checkpoint: Annotated[bool, typer.Option(help="commit a last checkpoint first")] = True,
    as_json: AsJson = False,
) -> None:
    """Cancel a job."""
    with connect() as client:
        job = client.cancel(job_id, grace_seconds=grace, checkpoint=checkpoint)
        show_json(job) if as_json else show_text(f"{job.id} is {job.state}")


def _show_lines(page: LinePage, as_json: bool) -> None:
    if as_json:
        show_json(page)
        return
    for line in page.data:
        show_line(line)


def _read(spec: Path) -> bytes:
    if str(spec) == "-":
        return sys.stdin.buffer.read()
    try:
        return spec.read_bytes()
    except OSError as error:
        print(f"trainshed: {spec}: {error.strerror}; name a readable job spec", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
