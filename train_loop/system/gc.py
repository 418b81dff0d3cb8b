"""Control of Python's garbage collection: all ranks collect at the same steps, because one rank delays all others.

Collection is off during long imports, which create many objects and free few.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 50


@contextmanager
def no_automatic_collection() -> Iterator[None]:
    """Disable automatic garbage collection in the body."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if automatic:
            gc.enable()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable automatic garbage collection in the body, and exclude existing objects from manual collections."""
    frozen_before = gc.get_freeze_count()
    keep_what_is_there()
    with no_automatic_collection():
        try:
            yield
        finally:
            if not frozen_before:
                gc.unfreeze()


def keep_what_is_there() -> None:
    """Collect once, then exclude all remaining objects from later collections."""
    gc.collect()
    gc.freeze()


def collect_garbage(step: int) -> None:
    """Collect after every 50th step. Frozen objects cost no time."""
    if step % EVERY_STEPS == 0:
        gc.collect()
