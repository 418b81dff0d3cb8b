"""The fork server's judgement of errors."""

import pytest

from train_loop.preflight.process.fork_server import lacks_memory


@pytest.mark.timeout(10)
@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_lacks_memory_ends_for_errors_that_cause_each_other(link: str) -> None:
    first, second = ValueError("first"), ValueError("second")
    setattr(first, link, second)
    setattr(second, link, first)
    assert not lacks_memory(first)
    own = ValueError("own")
    own.__cause__ = own
    assert not lacks_memory(own)


def test_lacks_memory_finds_the_failed_allocation_behind_other_errors() -> None:
    outer = ValueError("outer")
    outer.__context__ = MemoryError()
    assert lacks_memory(outer)
