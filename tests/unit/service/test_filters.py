"""Metrics in fewer lines."""

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from service.ports import Line
from service.use_cases.runs.filters import thin_out


@given(st.lists(st.none() | st.integers(0, 9)), st.integers(2, 12))
def test_few_lines_keep_the_extremes_of_all_in_their_order(losses: list[int | None], points: int) -> None:
    lines: list[Line] = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    kept = thin_out(iter(lines), points=points)
    steps = [int(str(line["step"])) for line in kept]
    assert len(kept) <= points
    assert steps == sorted(set(steps))
    assert extremes([losses[step] for step in steps]) == extremes(losses)
    if len(lines) <= points - points % 2:
        assert kept == lines
        return
    # Each part stands for no more than twice as many lines as the parts would have if all were used.
    size = math.ceil(len(lines) / (points // 2))
    gaps = [after - before for before, after in zip([-1, *steps], [*steps, len(lines)], strict=True)]
    assert max(gaps) < 4 * size


def extremes(losses: Sequence[int | None]) -> tuple[float, float] | None:
    """The least and the most; a loss that was not finite is null, and above all others."""
    heights = [math.inf if loss is None else loss for loss in losses]
    return (min(heights), max(heights)) if heights else None
