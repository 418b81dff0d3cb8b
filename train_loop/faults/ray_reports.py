"""Sentences for Ray's reports of dead actors. Pure functions."""

import re

TERMINATED = "was terminated by signal 15 (SIGTERM)"
"""End of an actor that got SIGTERM. Ray's workers turn that into exit code 1, which does not show it."""
_CAUSE = re.compile(r"The actor is dead because (.+?)\.(?=\s|$)")
_ACTOR = re.compile(r"^\s*class_name: (\w+)", re.MULTILINE)
_CLASS = re.compile(r"^(?:\w+\.)*\w*Error: ")


def describe_death(report: str) -> str:
    """Return the end of an actor from Ray's report of it, as the predicate of a sentence without Ray's advice."""
    if "receives a SIGTERM" in report:
        return TERMINATED
    first = _CLASS.sub("", report.partition("\n")[0])
    found = _CAUSE.search(report)
    return f"died: {first if found is None else found[1]}"


def shorten_report(text: str) -> str:
    """Return an error's text, or one sentence without ids if it is Ray's report of a dead actor."""
    actor = _ACTOR.search(text)
    return text if actor is None else f"Ray's actor {actor[1]} {describe_death(text)}"
