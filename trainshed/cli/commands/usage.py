"""`trainshed usage`: hours of each project on each day."""

from datetime import datetime
from typing import Annotated

import typer

from trainshed.cli.connect import connect
from trainshed.cli.options import AsJson
from trainshed.cli.output.printing import show_json, show_next
from trainshed.cli.output.usage import show_usage


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
