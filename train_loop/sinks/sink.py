"""Interface of sinks, and the points that they receive."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from train_loop import extras
from train_loop.errors import UserError
from train_loop.run_dir import Outcome, SinkName

_NO_SCALARS = {"seq", "time", "attempt", "step"}


@dataclass(frozen=True)
class Point:
    """One logged optimizer step: its values by tag, such as train/loss, and the Unix time at which it ended."""

    attempt: int
    step: int
    time: float
    scalars: Mapping[str, float]


class Sink(Protocol):
    """A destination that displays the metrics of one run."""

    settle_seconds: float
    """Seconds after a write until its points survive a killed driver; 0 if they do when `write` returns."""

    def write(self, points: Sequence[Point]) -> None:
        """Send points, some of them possibly again. Raises any error of the sink.

        Steps go back if the run resumed from an earlier checkpoint: the last point of a step counts.
        """

    def close(self, outcome: Outcome | None) -> None:
        """Make all points safe and release the sink. `outcome`: the attempt's outcome, None if it has none."""


def points(lines: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the points of metrics lines, without values that are not numbers."""
    return [
        Point(int(line["attempt"]), int(line["step"]), float(line["time"]), dict(_scalars(line)))
        for line in lines
        if "step" in line
    ]


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    rates: Sequence[float] = line.get("lr_groups", ())
    yield from ((f"train/lr_{group}", float(rate)) for group, rate in enumerate(rates))
    for name, value in line.items():
        if name in _NO_SCALARS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        yield (f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"), float(value)


def cannot_import(sink: SinkName, error: ImportError) -> UserError:
    """Return the error for a sink whose package is missing."""
    package = "tensorboardX" if sink == "tensorboard" else sink
    missing = extras.cannot_import(f"the sink {sink}", package, error)
    return UserError(f"{missing} on the cluster, or leave it out of TRAINSHED_SINKS")
