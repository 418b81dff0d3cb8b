"""When Python collects garbage: at the same steps on every rank, as one that collects makes all others wait.

It does not collect during long imports, which make much and drop little.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 50


@contextmanager
def no_automatic_collection() -> Iterator[None]:
    """Keep Python from collecting when it likes."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if automatic:
            gc.enable()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from collecting when it likes, and from looking again at all that is there already."""
    frozen_before = gc.get_freeze_count()
    keep_what_is_there()
    with no_automatic_collection():
        try:
            yield
        finally:
            if not frozen_before:
                gc.unfreeze()


def keep_what_is_there() -> None:
    """Collect once more among what is new, and never look again at what is left."""
    gc.collect()
    gc.freeze()


def collect_garbage(step: int) -> None:
    """Collect after every 50th step; what `no_garbage_collection` found there costs no time."""
    if step % EVERY_STEPS == 0:
        gc.collect()
