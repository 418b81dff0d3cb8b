"""Waiting for conditions, with a timeout."""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
SERVICE_PAUSE = 0.2
"""Seconds between two requests to a service. More frequent ones would slow down the job that the test waits for."""
_TESTS = str(Path(__file__).parents[1])
_LONGEST = 400
"""Maximum number of characters of a value in an error."""


def wait_for(
    condition: Callable[[], T | None], what: str = "the condition", *, seconds: float = 120.0, pause: float = 0.05
) -> T:
    """Return the first truthy result of a condition. Raises TimeoutError that names the missing event."""
    deadline = time.monotonic() + seconds
    while time.monotonic() <= deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(pause)
    answer, seen = observed(condition)
    if answer:
        return answer
    raise TimeoutError("\n  ".join([f"{what} did not come true within {seconds:g} s; last seen: {answer!r}", *seen]))


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended. They may end meanwhile."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def observed(condition: Callable[[], T]) -> tuple[T, list[str]]:
    """Call a condition. Return its answer, and its variables and what each function returned that test code called."""
    variables, returned = dict[str, str](), dict[str, str]()

    def record(frame: FrameType, event: str, value: Any) -> None:
        caller, name = frame.f_back, frame.f_code.co_qualname.rpartition("<locals>.")[2]
        if event == "return" and caller is not None and caller.f_code.co_filename.startswith(_TESTS):
            returned[name] = f"{name}(): {_short(value)}"
            if caller.f_code is observed.__code__:
                variables.update({name: f"{name} = {_short(value)}" for name, value in frame.f_locals.items()})

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        answer = condition()
    finally:
        sys.setprofile(before)
    return answer, [*variables.values(), *returned.values()]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
