"""`trainshed schema`: the JSON schema of the job spec, without a service."""

from pathlib import Path
from typing import Annotated

import typer

from train_loop.spec import dump_schema
from trainshed.cli.options import AsJson, write_file
from trainshed.cli.output.printing import show_next, show_text


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write instead of standard output")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the JSON schema of the job spec. Needs no service."""
    if output is None:
        print(dump_schema(), end="")
    else:
        write_file(output, dump_schema().encode())
        if not as_json:
            show_text(str(output))
    if not as_json:
        show_next("init")
