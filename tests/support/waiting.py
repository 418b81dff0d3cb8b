"""Waiting for a condition, with a limit."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T | None], *, seconds: float = 60.0, what: str = "the condition") -> T:
    """The first truthy answer of a condition. Raises TimeoutError after the limit."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"{what} was not so within {seconds:g} s")
