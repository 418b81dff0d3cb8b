"""Waiting for conditions, with a timeout."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SERVICE_PAUSE = 0.2
"""Seconds between two requests to a service. More frequent ones would slow down the job that the test waits for."""


def wait_for(
    condition: Callable[[], T | None], what: str = "the condition", *, seconds: float = 60.0, pause: float = 0.05
) -> T:
    """Return the first truthy result of a condition. Raises TimeoutError that names the missing event."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {seconds:g} s; last seen: {answer!r}")
        time.sleep(pause)
