"""Ranks for the tests of each file."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ranks.ranks import ranks_of_any_number


@pytest.fixture(scope="package")
def call_ranks() -> Iterator[Callable[..., Any]]:
    """Yield a function that runs another on the first of four ranks."""
    with ranks_of_any_number(4) as call:
        yield call
