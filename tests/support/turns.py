"""Tests that take turns: a commit runs some of them, and MORE all."""

from collections.abc import Callable, Sequence

import pytest

from tests.support.builders.searches import drawn


def turns(names: Sequence[str], number: int) -> Callable[[str], pytest.MarkDecorator]:
    """Return a function from the name of a test to a mark that skips it, unless the commit has drawn the name."""
    chosen = drawn(names, number)

    def in_turn(name: str) -> pytest.MarkDecorator:
        assert name in names
        return pytest.mark.skipif(name not in chosen, reason="other commits run it, and `make more`")

    return in_turn
