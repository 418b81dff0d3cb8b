"""Sparklines of metric values."""

import math

from hypothesis import given
from hypothesis import strategies as st

from trainshed.cli.output.sparklines import BARS, NOTHING, sparkline

NUMBERS = st.lists(st.none() | st.floats(), max_size=300)


def test_sparkline_maps_values_to_bars_and_missing_values_to_gaps() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == BARS[::-1]
    assert sparkline([3.0, 3.0], 8) == BARS[0] * 2
    assert sparkline([1.0, None, math.nan, math.inf, 2.0], 8) == f"{BARS[0]}{NOTHING * 3}{BARS[-1]}"
    assert sparkline([], 8) == ""


def test_sparkline_with_more_values_than_width_merges_values() -> None:
    assert sparkline([1, 1, 5, 5, 9, 9], 3) == f"{BARS[0]}{BARS[4]}{BARS[-1]}"


@given(NUMBERS, st.integers(1, 80))
def test_sparkline_length_is_minimum_of_width_and_value_count(values: list[float | None], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= {*BARS, NOTHING}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 80))
def test_sparkline_of_rising_values_rises(values: list[float], width: int) -> None:
    drawn = sparkline(sorted(values), width)
    assert list(drawn) == sorted(drawn)
