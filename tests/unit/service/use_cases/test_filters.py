"""Downsampling of metric lines."""

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from service.domain.runs.json_lines import Line
from service.use_cases.runs.filters import downsample


@given(st.lists(st.none() | st.integers(0, 9)), st.integers(2, 12))
def test_thin_out_keeps_extremes_and_order(losses: list[int | None], points: int) -> None:
    lines: list[Line] = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    kept = downsample(iter(lines), points=points)
    steps = [int(str(line["step"])) for line in kept]
    assert len(kept) <= points
    assert steps == sorted(set(steps))
    assert extremes([losses[step] for step in steps]) == extremes(losses)
    if len(lines) <= points - points % 2:
        assert kept == lines
        return
    # A gap between kept lines spans less than four times the lines per part.
    size = math.ceil(len(lines) / (points // 2))
    gaps = [after - before for before, after in zip([-1, *steps], [*steps, len(lines)], strict=True)]
    assert max(gaps) < 4 * size


def extremes(losses: Sequence[int | None]) -> tuple[float, float] | None:
    """Return the minimum and the maximum; None stands for a loss that was not finite and counts as infinity."""
    heights = [math.inf if loss is None else loss for loss in losses]
    return (min(heights), max(heights)) if heights else None
