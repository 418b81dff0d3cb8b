"""`--set a.b=c` → the part of a job spec that is to be different."""

import sys
from collections.abc import Sequence
from typing import Any

import typer

from train_loop.spec import SpecError, read_yaml


def read_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Values are YAML, as in a spec. Ends the command with a readable line and exit code 1 where one is no change."""
    whole: dict[str, Any] = {}
    for change in changes:
        place, equals, value = change.partition("=")
        *above, name = place.split(".")
        part = whole
        for step in above:
            part = part.setdefault(step, {})
            if not isinstance(part, dict):
                _fail(f"{change!r} goes on below a value that another --set gives")
        if not equals or not all((*above, name)):
            _fail(f"{change!r} is no change; write --set training.max_steps=200")
        try:
            part[name] = read_yaml(value)
        except SpecError as error:
            _fail(f"{change!r}: {error}")
    return whole


def _fail(message: str) -> None:
    print(f"trainshed: {message}", file=sys.stderr)
    raise typer.Exit(1)
