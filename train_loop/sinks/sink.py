"""What all sinks are given, and what is asked of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from train_loop.errors import UserError
from train_loop.run_dir import Outcome, SinkName

_NO_SCALARS = {"seq", "time", "attempt", "step"}


@dataclass(frozen=True)
class Point:
    """One logged optimizer step: its numbers by tag, as train/loss, and when it ended, in Unix seconds."""

    attempt: int
    step: int
    time: float
    scalars: Mapping[str, float]


class Sink(Protocol):
    """Somewhere that shows the metrics of one run."""

    settle_seconds: float
    """So long after it was written, a point outlives a driver that is killed; 0 where it does on return."""

    def write(self, points: Sequence[Point]) -> None:
        """Take points, some of them perhaps again. Raises whatever fails.

        Steps go back where the run went back to a checkpoint: the last of a step counts.
        """

    def close(self, outcome: Outcome | None) -> None:
        """Have all points safe, and let go; `outcome` is how the attempt ended, None where nobody has said so."""


def points(lines: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The points of metrics lines; what is no number is left out."""
    return [
        Point(int(line["attempt"]), int(line["step"]), float(line["time"]), dict(_scalars(line)))
        for line in lines
        if "step" in line
    ]


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if name in _NO_SCALARS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        yield (f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"), float(value)


def cannot_import(sink: SinkName, error: ImportError) -> UserError:
    """What is said where the package of a sink is missing."""
    extra = "trainshed" if sink == "tensorboard" else f"trainshed[{sink}]"
    return UserError(
        f"the sink {sink} needs a package that cannot be imported here ({error}); run pip install '{extra}' on the "
        "cluster, or leave it out of TRAINSHED_SINKS"
    )
