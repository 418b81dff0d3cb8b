"""Garbage collection at fixed steps only."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from train_loop.system.gc import EVERY_STEPS, collect_garbage, no_garbage_collection


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """Let a test begin as a process does; the suite has frozen its imports."""
    gc.unfreeze()
    yield
    gc.freeze()


class Ring:
    """Garbage that only a collection can free."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_is_collected_at_its_step_and_gc_is_restored() -> None:
    automatic = gc.isenabled()
    with no_garbage_collection():
        assert not gc.isenabled()
        ring = weakref.ref(Ring())
        collect_garbage(EVERY_STEPS - 1)
        assert ring() is not None
        collect_garbage(EVERY_STEPS)
        assert ring() is None
    assert (gc.isenabled(), gc.get_freeze_count()) == (automatic, 0)


def test_gc_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), no_garbage_collection():
        raise RuntimeError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_frozen_earlier_stay_frozen() -> None:
    gc.freeze()
    with no_garbage_collection():
        pass
    assert gc.get_freeze_count() > 0
