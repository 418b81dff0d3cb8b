"""Conversion of `--set a.b=c` options to overrides of a job spec."""

from collections.abc import Sequence
from typing import Any

from service.cli.ends import Exit, fail
from train_loop.spec import SpecError, read_yaml


def read_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Merge changes into one mapping; values are YAML. Exits with a one-line error and code 2 if one is invalid."""
    whole: dict[str, Any] = {}
    for change in changes:
        place, equals, value = change.partition("=")
        *above, name = place.split(".")
        part = whole
        for step in above:
            part = part.setdefault(step, {})
            if not isinstance(part, dict):
                fail(f"{change!r} is below a value that another --set sets", code=Exit.USAGE)
        if not equals or not all((*above, name)):
            fail(f"invalid override {change!r}; expected e.g. --set training.max_steps=200", code=Exit.USAGE)
        try:
            part[name] = read_yaml(value)
        except SpecError as error:
            fail(f"{change!r}: {error}", code=Exit.USAGE)
    return whole


def made_by(pointer: str, changes: Sequence[str]) -> str | None:
    """Return the change that set the value at a JSON pointer, or None."""
    places = {"/" + change.partition("=")[0].replace(".", "/"): change for change in changes}
    return next((change for place, change in places.items() if f"{pointer}/".startswith(f"{place}/")), None)
