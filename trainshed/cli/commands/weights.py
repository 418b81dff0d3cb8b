"""`trainshed weights`: weights of other programs as folders that a job can start from."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from train_loop.extras import install
from train_loop.weights.result import Converted
from trainshed.cli.exit_codes import fail
from trainshed.cli.options import AsJson
from trainshed.cli.output.printing import notes, show_json, show_next, show_note, show_text

app = typer.Typer(no_args_is_help=True, help="Convert weights of other programs for model.path.")
_LAST_LINES = 15


@app.callback()
def weights() -> None:
    """Convert weights of other programs for model.path."""


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help=".pt or .bin file, or a folder: sharded .bin, or a DCP checkpoint"),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="path of the new folder")],
    entry: Annotated[str | None, typer.Option(help="key of the state dict in the file, if it has several")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="model folder or run directory with config and tokenizer [default: the folder of IN]"),
    ] = None,
    memory_mib: Annotated[
        int, typer.Option("--memory-mib", min=64, help="memory to read with, besides mapped files")
    ] = 1024,
    as_json: AsJson = False,
) -> None:
    """Convert weights to a folder with safetensors, bit for bit.

    The files are read without running code in them, by a process without network and with limited memory.
    """
    if find_spec("torch") is None:
        fail(f"torch is not installed here; run {install('torch')}")
    options = {"--entry": entry, "--config": config, "--memory-mib": memory_mib}
    given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    # A path that begins with a dash is not an option.
    paths = [str(source.absolute()), str(target.absolute())]
    with notes.status("converting"):
        done = subprocess.run(
            [sys.executable, "-m", "train_loop.weights", *paths, *given], capture_output=True, text=True, check=False
        )
    try:
        answer = json.loads(done.stdout)
    except (ValueError, RecursionError):
        fail(f"the conversion ended with {done.returncode}; its output ends with", _last_lines(done.stderr))
    if "error" in answer:
        fail(answer["error"])
    found = Converted.model_validate(answer)
    if as_json:
        show_json(found)
        return
    show_text(found.folder)
    for note in found.notes:
        show_note(note)
    show_note(f"{found.tensors} tensors, {found.bytes} bytes of {found.dtype or 'several dtypes'}")
    show_next("init")


def _last_lines(text: str) -> list[str]:
    return text.splitlines()[-_LAST_LINES:]
