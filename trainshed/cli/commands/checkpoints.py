"""`trainshed checkpoints`, `verify`, `pin` and `export`."""

import time
from typing import Annotated, Literal, get_args

import typer
from rich.progress import Progress

from service.api.schemas import ExportIn, ExportOut
from train_loop.run_dir import storage_path
from train_loop.spec import DTYPES
from trainshed import Api
from trainshed.cli.connect import LONG_SECONDS, connect
from trainshed.cli.exit_codes import Exit, fail
from trainshed.cli.ids import find_job
from trainshed.cli.options import AsJson, JobRef, Step
from trainshed.cli.output.checkpoints import show_checkpoints
from trainshed.cli.output.printing import notes, show_json, show_next, show_note, show_text

_POLL_SECONDS = 1.0
Dtype = Literal["bf16", "fp16", "fp32"]


def _read_dtype(name: str) -> str:
    """Return the dtype of a name as in a spec, such as bfloat16."""
    dtype = DTYPES.get(name, name)
    if dtype not in get_args(Dtype):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, get_args(Dtype)))}.")
    return dtype


def checkpoints(job: JobRef, as_json: AsJson = False) -> None:
    """List committed checkpoints, oldest first."""
    with connect() as api:
        job_id = find_job(api, job)
        answer = api.checkpoints(job_id)
    if as_json:
        show_json(answer)
        return
    show_checkpoints(answer)
    show_next(f"export {job_id} {answer.data[-1].step}" if answer.data else f"show {job_id}")


def verify(job: JobRef, step: Step, as_json: AsJson = False) -> None:
    """Verify the SHA-256 checksums of a checkpoint. Exits with 1 if it is damaged."""
    with connect() as api:
        job_id = find_job(api, job)
        found = api.verify(job_id, step)
    if as_json:
        show_json(found)
    else:
        damage = f"the checkpoint of step {step} is damaged; a run resumes from the one before it\n"
        show_text(damage + "\n".join(found.faults) if found.faults else f"the checkpoint of step {step} is whole")
        show_next(f"export {job_id} {step}" if found.ok else f"checkpoints {job_id}")
    raise typer.Exit(Exit.DONE if found.ok else Exit.FAILED)


def pin(
    job: JobRef,
    step: Step,
    remove: Annotated[bool, typer.Option("--remove", help="remove the pin")] = False,
    as_json: AsJson = False,
) -> None:
    """Pin a checkpoint: keep it regardless of keep_last and keep_best."""
    with connect() as api:
        job_id = find_job(api, job)
        kept = api.unpin(job_id, step) if remove else api.pin(job_id, step)
    if as_json:
        show_json(kept)
        return
    show_text(f"the checkpoint of step {kept.step} is {'pinned' if kept.pinned else 'left to retention'}")
    show_next(f"checkpoints {job_id}")


def export(
    job: JobRef,
    step: Step,
    dtype: Annotated[
        str | None,
        typer.Option(
            parser=_read_dtype,
            metavar="bf16|fp16|fp32",
            help="data type [default: the job's model.dtype; fp32 for adapters]",
        ),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="export the EMA weights")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="with model.lora: the model with the adapters added, not a folder for peft")
    ] = False,
    dequantized: Annotated[
        bool, typer.Option("--dequantized", help="with model.quantize_base: as --merged, of the restored weights")
    ] = False,
    include: Annotated[
        Literal["optimizer"] | None,
        typer.Option("--with", help="also the optimizer state, for training.optimizer_state of another job"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint as a Hugging Face folder, wait until it is done, and print its path."""
    form = "dequantized" if dequantized else "merged" if merged else None
    options = {"dtype": dtype, "weights": "ema" if ema else "model", "form": form, "include": include}
    request = ExportIn.model_validate(options)
    with connect(retry_seconds=LONG_SECONDS) as api:
        job_id = find_job(api, job)
        status = _exported(api, job_id, step, request)
    if as_json:
        show_json(status)
        raise typer.Exit(Exit.DONE if status.state == "done" else Exit.FAILED)
    if status.state != "done":
        fail(f"the export failed: {status.reason}")
    # In the form that from_pretrained accepts: a path on a file system, a URI elsewhere.
    show_text(str(storage_path(status.path)))
    if status.difference is not None:
        show_note(f"outputs differ from those of the model with adapters by at most {status.difference:.3g}")
    show_next(f"pin {job_id} {step}")


def _exported(api: Api, job_id: str, step: int, request: ExportIn) -> ExportOut:
    """Start an export, show its progress until it finishes, and return its final status."""
    status, shown = api.export(job_id, step, request), ""
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as bar:
        row = bar.add_task("exporting", total=1.0)
        while status.state == "running":
            bar.update(row, completed=status.progress)
            if not notes.is_terminal and shown != (shown := f"exporting: {status.progress:.0%}"):
                show_note(shown)
            time.sleep(_POLL_SECONDS)
            status = api.exported(job_id, step, request)
    return status
