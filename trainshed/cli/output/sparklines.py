"""Sparklines of a run's metrics, as wide as the terminal."""

import math
from collections.abc import Sequence

from service.domain.runs.json_lines import number
from trainshed import Line
from trainshed.cli.output.printing import console, show_text

_CURVES = {"loss": "loss", "tokens/s": "tokens_per_second", "gradient norm": "grad_norm", "learning rate": "lr"}
_NAMES = max(map(len, _CURVES))
_LEAST_WIDTH = 10
BARS = "▁▂▃▄▅▆▇█"
NOTHING = " "
"""Placeholder for a missing value."""


def show_curves(lines: Sequence[Line]) -> None:
    """Print a sparkline per metric, with its first and last value. For repeated steps, the last one counts."""
    steps = {step: line for line in lines if (step := number(line, "step")) is not None}
    if not steps:
        show_text("no step is logged yet")
        return
    show_text(f"steps {min(steps):.0f} to {max(steps):.0f}")
    for name, field in _CURVES.items():
        values = [number(steps[step], field) for step in sorted(steps)]
        known = [value for value in values if value is not None]
        # Own code counts no tokens.
        if any(known) or (known and field != "tokens_per_second"):
            ends = f"{known[0]:.4g} → {known[-1]:.4g}"
            width = max(console.width - _NAMES - len(ends) - 4, _LEAST_WIDTH)
            show_text(f"{name:>{_NAMES}}  {sparkline(values, width)}  {ends}")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return at most `width` bars, each the mean of equally many values, scaled from the least to the largest mean."""
    means = [_mean(part) for part in _parts(values, width)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return NOTHING * len(means)
    least, most = min(known), max(known)
    return "".join(NOTHING if mean is None else BARS[_height(mean, least, most)] for mean in means)


def _parts(values: Sequence[float | None], width: int) -> list[Sequence[float | None]]:
    count = min(width, len(values))
    return [values[len(values) * part // count : len(values) * (part + 1) // count] for part in range(count)]


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the finite values, or None. Divides first to avoid overflow, and clamps rounding errors."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return min(max(sum(value / len(known) for value in known), min(known)), max(known)) if known else None


def _height(value: float, least: float, most: float) -> int:
    # Halved, because the full range may overflow a float.
    distance = most / 2 - least / 2
    return min(int((value / 2 - least / 2) / distance * len(BARS)), len(BARS) - 1) if distance else 0
